"""Keys and values of a running batch, and attention over them.

Row i of the batch owns slot i; its keys and values are left-aligned, at the positions of their tokens. One forward pass
takes the tokens of all rows packed one after the other: first one token of each row that decodes, then all tokens of
each row that joins. Everything but attention is indifferent to which row a token belongs to, so nothing is padded
there; attention comes here (transformers lets a model's attention function be replaced by name).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

ATTENTION_NAME = "forebay_slots"
CACHE_ARGUMENT = "forebay_slot_cache"  # forwarded by the model to its attention function

_WIDTH_STEP = 64  # the cache grows by at least this many tokens
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # what some models ask of their attention beyond the standard


@dataclass(frozen=True, slots=True)
class _Joining:
    """Rows that join, of like length: ``index`` (rows x width) are their tokens in the packed pass, right-padded."""

    first_slot: int
    index: torch.Tensor
    real: torch.Tensor | None  # rows x width, false on padding; None without any


class SlotCache:
    """Tensors of slots x tokens x heads x head_dim per layer, which grow as needed."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._slots = 0
        self._width = 0
        self._positions = torch.empty(0, dtype=torch.long)
        self._rows = torch.empty(0, dtype=torch.long)
        self._mask = torch.empty(0)
        self._joining: list[_Joining] = []

    def prepare(self, positions: Sequence[int], joining: Sequence[int]) -> None:
        """Lay out the next forward pass.

        The first ``len(positions)`` rows decode one token each, at these positions; rows of ``joining`` many tokens
        follow. Rows of like length should stand together: a group is padded to its longest, for attention only.
        """
        decoding = len(positions)
        width = max(positions, default=-1) + 1
        self._reserve(decoding + len(joining), max(width, *joining) if joining else width)
        self._positions = torch.tensor(positions, dtype=torch.long)
        self._rows = torch.arange(decoding)
        self._mask = torch.zeros(decoding, 1, 1, width)
        self._mask.masked_fill_(torch.arange(width) > self._positions.view(-1, 1, 1, 1), -math.inf)
        self._joining = []
        row, token = 0, decoding
        for size in _groups_of_like_length(joining):
            lengths = torch.tensor(joining[row : row + size])
            columns = torch.arange(int(lengths.max()))
            starts = token + lengths.cumsum(0) - lengths
            # Padding repeats the last token, to the right, where causality hides it from every real one.
            index = starts.unsqueeze(1) + torch.minimum(columns, lengths.unsqueeze(1) - 1)
            real = columns < lengths.unsqueeze(1)
            self._joining.append(_Joining(decoding + row, index, None if bool(real.all()) else real))
            row, token = row + size, token + int(lengths.sum())

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store the new keys and values (heads x tokens x head_dim) and attend; returns tokens x heads x head_dim."""
        if layer == len(self._keys):
            shape = (self._slots, self._width, keys.shape[0])
            self._keys.append(torch.zeros(*shape, keys.shape[2]))
            self._values.append(torch.zeros(*shape, values.shape[2]))
        outputs = []
        if len(self._rows):
            outputs.append(self._attend_decoding(layer, queries, keys, values, scale))
        outputs += [self._attend_joining(group, layer, queries, keys, values, scale) for group in self._joining]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a model calls on its cache: storing is left to ``attend``, which follows at once."""
        return keys, values

    def get_seq_length(self, _: int = 0) -> int:
        """Of no use here (positions are explicit), but part of what models may ask of a cache."""
        return 0

    def move(self, sources: list[int], targets: list[int], width: int) -> None:
        """Copy the first ``width`` tokens of slots, to close the gaps that finished rows leave."""
        for tensor in (*self._keys, *self._values):
            tensor[targets, :width] = tensor[sources, :width]

    def clear(self) -> None:
        """Give the memory back. Also gets rid of NaNs, which a mask would not keep out of an attention sum."""
        self._keys.clear()
        self._values.clear()
        self._slots = self._width = 0

    def _attend_decoding(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        count, width = len(self._rows), self._mask.shape[-1]
        all_keys, all_values = self._keys[layer], self._values[layer]
        all_keys[self._rows, self._positions] = keys[:, :count].transpose(0, 1)
        all_values[self._rows, self._positions] = values[:, :count].transpose(0, 1)
        # Query heads that share a key head stand as several queries of that head: no copy of the keys.
        heads, _, head_dim = queries.shape
        grouped = queries[:, :count].transpose(0, 1).reshape(count, len(keys), heads // len(keys), head_dim)
        output = scaled_dot_product_attention(
            grouped,
            all_keys[:count, :width].transpose(1, 2),
            all_values[:count, :width].transpose(1, 2),
            attn_mask=self._mask,
            scale=scale,
        )
        return output.reshape(count, heads, values.shape[2])

    def _attend_joining(
        self,
        group: _Joining,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        rows, width = group.index.shape
        own_keys, own_values = keys[:, group.index], values[:, group.index]  # heads x rows x width x head_dim
        slots = slice(group.first_slot, group.first_slot + rows)
        self._keys[layer][slots, :width] = own_keys.permute(1, 2, 0, 3)
        self._values[layer][slots, :width] = own_values.permute(1, 2, 0, 3)
        sharing = len(queries) // len(keys)
        if sharing > 1:
            own_keys, own_values = own_keys.repeat_interleave(sharing, 0), own_values.repeat_interleave(sharing, 0)
        output = scaled_dot_product_attention(
            queries[:, group.index].transpose(0, 1),
            own_keys.transpose(0, 1),
            own_values.transpose(0, 1),
            is_causal=True,
            scale=scale,
        ).transpose(1, 2)
        return output.flatten(0, 1) if group.real is None else output[group.real]

    def _reserve(self, slots: int, width: int) -> None:
        if slots <= self._slots and width <= self._width:
            return
        if slots > self._slots:
            slots = max(slots, 2 * self._slots)
        if width > self._width:
            width = max(math.ceil(width / _WIDTH_STEP) * _WIDTH_STEP, self._width * 3 // 2)
        slots, width = max(slots, self._slots), max(width, self._width)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                # Zeros, not empty: whatever lies behind the mask must be finite.
                tensors[layer] = torch.zeros((slots, width, *old.shape[2:]))
                tensors[layer][: old.shape[0], : old.shape[1]] = old
        self._slots, self._width = slots, width


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - part of the interface; the cache knows its own masks
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers; tensors are 1 x heads x tokens x head_dim.

    Raises:
        NotImplementedError: the model wants attention that this server does not compute.
    """
    wanted = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if wanted:
        raise NotImplementedError(f"the tiny server does not support attention with {', '.join(wanted)}")
    cache: SlotCache = kwargs[CACHE_ARGUMENT]
    return cache.attend(module.layer_idx, query[0], key[0], value[0], scaling).unsqueeze(0), None


def _groups_of_like_length(lengths: Sequence[int]) -> list[int]:
    """Sizes of consecutive groups of which none is padded to more than about twice its shortest."""
    sizes: list[int] = []
    shortest = longest = 0
    for length in lengths:
        if sizes and max(longest, length) <= 2 * min(shortest, length) + 16:
            sizes[-1] += 1
            shortest, longest = min(shortest, length), max(longest, length)
        else:
            sizes.append(1)
            shortest = longest = length
    return sizes
