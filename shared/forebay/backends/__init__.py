"""Clients of inference servers, one module per server protocol.

A back-end is a module of this package, named like the setting ``backend``, that defines ``BACKEND``, a subclass of
:class:`~forebay.backends.base.Backend`. Adding one is adding a file; nothing else lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from forebay.backends.base import Backend, ModelInfo, Segment, ServerError, make_session
from forebay.errors import SettingsError

if TYPE_CHECKING:
    import aiohttp

    from forebay.settings import EngineSettings

__all__ = ["Backend", "ModelInfo", "Segment", "ServerError", "make_backend", "make_session"]


def make_backend(name: str, base_url: str, session: aiohttp.ClientSession, settings: EngineSettings) -> Backend:
    """The client of the one server at `base_url`, speaking the protocol `name`.

    Raises:
        SettingsError: there is no such back-end.
    """
    module_name = f"{__name__}.{name}"
    # A dotted or odd name would reach other modules than those of this package.
    if not name.isidentifier() or name == "base":
        raise SettingsError(f"backend={name!r}: there is no such back-end; use 'sglang'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:  # the back-end exists, but something that it needs is not installed
            raise
        raise SettingsError(f"backend={name!r}: there is no such back-end; use 'sglang'") from None
    kind: type[Backend] = module.BACKEND
    return kind(base_url, session, settings)
