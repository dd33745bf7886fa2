"""Sampling parameters of SGLang's protocol, and the sampling of a whole batch at once.

A request's random numbers are a function of its seed and of the position of the token alone, so that a seeded request
gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forebay_ops.tiny_server.request import Request

DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
_GREEDY_BELOW = 1e-6  # SGLang's: a temperature below it means greedy
_MAX_SEED = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Checked sampling parameters; the names and the defaults are SGLang's.

    ``max_new_tokens`` of -1 stands for "not given". ``top_k`` of -1 is the whole vocabulary. ``ignore_eos`` switches
    off ``stop_token_ids`` as well, as in SGLang.
    """

    max_new_tokens: int = -1
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    frequency_penalty: float = 0.0
    sampling_seed: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        """The most likely token is taken, and logprobs are those of temperature 1."""
        return self.temperature < _GREEDY_BELOW

    @classmethod
    def parse(cls, raw: object) -> SamplingParams:
        """Check the ``sampling_params`` of a request; a value of null means the default.

        Raises:
            ValueError: an unknown key or a value out of range; the message names the key.
        """
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise ValueError("sampling_params must be an object")  # noqa: TRY004 - one error for bad input
        unknown = sorted(str(key) for key in raw.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"sampling_params has keys this server does not know: {', '.join(unknown)}")
        given = {key: value for key, value in raw.items() if value is not None}
        params = cls(
            max_new_tokens=_integer(given, "max_new_tokens", -1, low=1),
            min_new_tokens=_integer(given, "min_new_tokens", 0, low=0),
            temperature=_number(given, "temperature", 1.0, low=0.0),
            top_p=_number(given, "top_p", 1.0, low=0.0, high=1.0),
            top_k=_integer(given, "top_k", -1, low=-1),
            stop=_strings(given.get("stop", ())),
            stop_token_ids=_token_ids(given.get("stop_token_ids", ())),
            ignore_eos=_flag(given, "ignore_eos", False),
            skip_special_tokens=_flag(given, "skip_special_tokens", True),
            frequency_penalty=_number(given, "frequency_penalty", 0.0, low=-2.0, high=2.0),
            sampling_seed=_integer(given, "sampling_seed", 0, low=0) if "sampling_seed" in given else None,
            n=_integer(given, "n", 1, low=1),
        )
        if params.top_p == 0.0:
            raise ValueError("sampling_params.top_p must be above 0")
        if params.top_k == 0:
            raise ValueError("sampling_params.top_k must be -1 (off) or at least 1")
        if params.n != 1:
            raise ValueError("sampling_params.n must be 1: send one request per sample")
        if params.sampling_seed is not None and params.sampling_seed >= _MAX_SEED:
            raise ValueError("sampling_params.sampling_seed must be below 2**64")
        if 0 <= params.max_new_tokens < params.min_new_tokens:
            raise ValueError("sampling_params.min_new_tokens must not exceed max_new_tokens")
        return params


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
    """Draw the next token of every request from ``logits`` (requests x vocabulary, float32; changed in place).

    Returns token ids and their logprobs: the log-softmax of logits / temperature (greedy: of the logits) over the full
    vocabulary, after the frequency penalty, before top-k, top-p and the ban on stop tokens below ``min_new_tokens``.
    """
    _penalise_repeats(logits, requests)
    greedy = [request.params.greedy for request in requests]
    temperatures = [1.0 if request.params.greedy else request.params.temperature for request in requests]
    if any(temperature != 1.0 for temperature in temperatures):
        logits /= torch.tensor(temperatures).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    allowed = _ban_early_stops(logprobs, requests)
    if all(greedy):
        token_ids = allowed.argmax(dim=-1)
    else:
        token_ids = _draw(_filtered(allowed, requests), requests)
        if any(greedy):
            token_ids = torch.where(torch.tensor(greedy), allowed.argmax(dim=-1), token_ids)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return token_ids.tolist(), chosen.tolist()


def uniforms(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in (0, 1) per (seed, step): SplitMix64 read at any position, hence without a state to keep."""
    mixed = _mix64(_mix64(seeds) + (steps + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    # 48 bits: with all 64 the largest value would round up to 1.0.
    return ((mixed >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _penalise_repeats(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    for row, request in enumerate(requests):
        if request.params.frequency_penalty and request.output:
            counts = torch.bincount(torch.tensor(request.output), minlength=logits.shape[1])
            logits[row] -= request.params.frequency_penalty * counts


def _ban_early_stops(logprobs: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    allowed = logprobs
    for row, request in enumerate(requests):
        if request.stop_ids and len(request.output) < request.params.min_new_tokens:
            if allowed is logprobs:
                allowed = logprobs.clone()
            allowed[row, list(request.stop_ids)] = -math.inf
    return allowed


def _filtered(logprobs: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Unnormalised float64 probabilities, zero outside each row's top-k and then its top-p of what top-k left."""
    weights = logprobs.double().exp_()
    vocabulary = weights.shape[1]
    rows = [i for i, r in enumerate(requests) if r.params.top_p < 1.0 or 0 < r.params.top_k < vocabulary]
    if not rows:
        return weights
    top_k = torch.tensor([r.params.top_k if r.params.top_k > 0 else vocabulary for r in (requests[i] for i in rows)])
    top_p = torch.tensor([requests[i].params.top_p for i in rows], dtype=torch.float64)
    ordered, order = weights[rows].sort(dim=-1, descending=True)
    ordered[torch.arange(vocabulary) >= top_k.unsqueeze(1)] = 0.0
    before = ordered.cumsum(dim=-1) - ordered  # mass of the likelier tokens: the first one is always kept
    ordered[before > top_p.unsqueeze(1) * ordered.sum(dim=-1, keepdim=True)] = 0.0
    weights[rows] = torch.zeros_like(ordered).scatter_(1, order, ordered)
    return weights


def _draw(weights: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Inverse-CDF sampling, one uniform number per row."""
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    steps = np.array([len(request.output) for request in requests], dtype=np.uint64)
    cumulative = weights.cumsum(dim=-1)
    targets = torch.from_numpy(uniforms(seeds, steps)).unsqueeze(1) * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Only a row of NaN runs off the end; its logprob then tells the engine.
    return token_ids.clamp_(max=weights.shape[1] - 1)


def _number(given: Mapping[str, object], key: str, default: float, *, low: float, high: float | None = None) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"sampling_params.{key} must be a finite number, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"sampling_params.{key} must be {limits}, got {value!r}")
    return float(value)


def _integer(given: Mapping[str, object], key: str, default: int, *, low: int) -> int:
    value = given.get(key, default)
    if key not in given:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"sampling_params.{key} must be an integer of at least {low}, got {value!r}")
    return value


def _flag(given: Mapping[str, object], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"sampling_params.{key} must be true or false, got {value!r}")  # noqa: TRY004 - as above
    return value


def _strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise ValueError("sampling_params.stop must be a non-empty string or a list of them")
    return tuple(items)


def _token_ids(value: object) -> frozenset[int]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise ValueError("sampling_params.stop_token_ids must be a list of integers")
    return frozenset(value)
