"""This file is tree attention in torch: the rows of a step attend over their session's prefix and their own tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treewire.kv.store import KvStore
from verify_service.attention.layout import Group, StepLayout


class LayerCall(NamedTuple):
    """One layer's attention in a step, and the window it asked for."""

    layer: int
    window: int | None


Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]
"""Attention itself: query [segments, heads, rows, size], key and value [segments, KV heads, keys, size], additive mask
[segments, rows, keys] or None, whether it is plain causal, scale; returns [segments, heads, rows, value size]."""


def fused_core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """PyTorch's own attention, the fastest. Its rounding depends on how many rows and keys there are."""
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else mask[:, None],
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def double_core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Attention in float64, rounded once: the same bits for a row however many rows and keys are beside its own.

    Sums still differ with their order, but by so little that the rounding to the rows' type nearly always removes it.
    """
    num_segments, num_heads, num_rows, size = query.shape
    grouped = query.double().mul_(scale).reshape(num_segments, key.shape[1], -1, size)
    key, value = (tensor.to(torch.float64, memory_format=torch.contiguous_format) for tensor in (key, value))
    scores = grouped @ key.transpose(-1, -2)
    if is_causal:
        mask = scores.new_full((1, num_rows, num_rows), float("-inf")).triu_(1)
    if mask is not None:
        scores.view(*scores.shape[:2], -1, num_rows, scores.shape[-1]).add_(mask[:, None, None])
    attended: Tensor = scores.softmax(-1) @ value
    return attended.view(num_segments, num_heads, num_rows, -1).to(query.dtype)


class TreeAttention:
    """Attention of one model over one KV store. `begin` a step, then call it once for every layer.

    It is exact for any layout: scaled dot products of each segment with the keys that it sees, and with no others.
    """

    def __init__(self, store: KvStore, core: Core = fused_core) -> None:
        self.store = store
        self._core = core
        self._layout: StepLayout | None = None
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self.calls: list[LayerCall] = []

    def begin(self, layout: StepLayout) -> None:
        """The next calls, one for each layer, are for this layout."""
        self._layout = layout
        self._masks.clear()
        self.calls.clear()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Write the step's keys and values [rows, KV heads, size] and attend with queries [rows, heads, size].

        `scale` is one over the root of the size by default; `window`: rows see fewer than that many positions back,
        themselves included, None is no limit. Returns [rows, heads, value size].
        """
        layout = self._layout
        assert layout is not None, "attention is called outside a step"
        self.calls.append(LayerCall(layer, window))
        self.store.write(layer, layout.slots, key, value)
        if window is not None and layout.max_position < window:
            window = None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attended = [self._attend(layer, number, group, query, scale, window) for number, group in enumerate(layout.groups)]
        together = torch.cat(attended) if len(attended) > 1 else attended[0]
        return together if layout.order is None else together[layout.order]

    def _attend(self, layer: int, number: int, group: Group, query: Tensor, scale: float, window: int | None) -> Tensor:
        """One group's rows, without its padding, [rows, heads, value size]."""
        stored = self.store.read(layer, group.key_slots)
        is_causal = group.is_fresh_chain and window is None
        needs_no_mask = is_causal or (group.sees_all and window is None)
        mask = None if needs_no_mask else self._mask(number, group, window, query.dtype)
        attended = self._core(
            self._queries(group, query).transpose(1, 2),
            stored.keys.transpose(1, 2),
            stored.values.transpose(1, 2),
            mask,
            is_causal,
            scale,
        )
        rows = attended.transpose(1, 2).flatten(0, 1)
        return rows if group.real is None else rows[group.real]

    def _queries(self, group: Group, query: Tensor) -> Tensor:
        """The group's queries [segments, rows, heads, size]; a view if the group is the step."""
        assert self._layout is not None
        if len(self._layout.groups) == 1 and group.real is None:
            return query.view(*group.rows.shape, *query.shape[1:])
        return query[group.rows]

    def _mask(self, number: int, group: Group, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [segments, rows, keys] of a group, made once a step and used by all layers."""
        if (number, window) not in self._masks:
            visible = group.visibility(window)
            self._masks[number, window] = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return self._masks[number, window]
