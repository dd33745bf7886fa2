"""Tokenizers and processors, loaded once for each worker (contract, section 2)."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from forebay.errors import WorkflowError

__all__ = ["PretrainedCache", "load_processor", "load_tokenizer"]


class PretrainedCache:
    """What was loaded, by kind and path; of more than `entries` the least recently used goes."""

    def __init__(self, entries: int = 16) -> None:
        self._entries = entries
        self._loaded: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, kind: str, path: str) -> Any:
        """The `kind` (``tokenizer`` or ``processor``) at `path`, loaded on first use. Raises WorkflowError."""
        with self._lock:
            if (kind, path) not in self._loaded:
                self._loaded[kind, path] = _load(kind, path)
                if len(self._loaded) > self._entries:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end((kind, path))
            return self._loaded[kind, path]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let :func:`load_tokenizer` and :func:`load_processor` find this cache."""
        token = _cache.set(self)
        try:
            yield
        finally:
            _cache.reset(token)


_cache: ContextVar[PretrainedCache | None] = ContextVar("forebay_pretrained", default=None)


def load_tokenizer(path: str) -> Any:
    """The tokenizer at `path`, a folder or a name.

    Its ``apply_chat_template(..., tokenize=True)`` returns a list of token ids, with any version of transformers;
    version 5 by itself returns a dict, as this one does with ``return_dict=True``.

    In the constructor of a workflow on a worker it is shared with the worker's other workflows; elsewhere it is loaded
    anew. Raises WorkflowError.
    """
    return _from_cache("tokenizer", path)


def load_processor(path: str) -> Any:
    """The processor at `path`; otherwise as :func:`load_tokenizer`."""
    return _from_cache("processor", path)


def _from_cache(kind: str, path: str) -> Any:
    cache = _cache.get()
    return _load(kind, path) if cache is None else cache.get(kind, path)


def _load(kind: str, path: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise WorkflowError(f"loading the {kind} {path} needs transformers; install forebay[workers]") from None
    loader: Any = transformers.AutoTokenizer if kind == "tokenizer" else transformers.AutoProcessor
    try:
        loaded = loader.from_pretrained(path, trust_remote_code=False)  # and nobody is asked
    except (OSError, ValueError) as error:
        raise WorkflowError(f"the {kind} {path} cannot be loaded here: {error}") from error
    return _with_ids(loaded) if kind == "tokenizer" else loaded


def _with_ids(tokenizer: Any) -> Any:
    # Workflows that were written for transformers 4 take the result for ids; list() of a dict would be its keys. On the
    # instance, so that tokenizers which others load stay as they are. It travels with pickle and deepcopy.
    template = getattr(tokenizer, "apply_chat_template", None)
    if template is not None:
        tokenizer.apply_chat_template = functools.partial(template, return_dict=False)
    return tokenizer
