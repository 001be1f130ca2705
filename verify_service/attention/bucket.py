"""This file is attention over a bucket: a batch of trees padded to one size, whose numbers lie in memory that does not move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewire.kv.store import KvStore
from verify_service.attention.tree_attention import fused_core


class BucketShape(NamedTuple):
    """Sessions, nodes of each, and committed tokens of each that a bucket has room for."""

    num_sessions: int
    num_nodes: int
    context: int


class Heads(NamedTuple):
    """Query and KV heads of a rank, and their size."""

    num_heads: int
    num_kv_heads: int
    size: int


class BucketRows(NamedTuple):
    """What a bucket's rows see, on the device. Every row sees itself, its ancestors and its session's committed tokens.

    `lengths` and `counts` int64 [sessions]: committed tokens and real nodes. `slots` int64 [sessions, nodes]: where the nodes'
    keys and values are. `key_slots` int64 [sessions, context + nodes]: those of the committed tokens in order of position,
    and in the last columns the nodes'; elsewhere slots that hold finite numbers. `visible` bool [sessions, nodes, nodes].
    """

    lengths: Tensor
    counts: Tensor
    slots: Tensor
    key_slots: Tensor
    visible: Tensor


class BucketAttention(Protocol):
    """Attention of one bucket. A step is `plan`, on the host; then, on the device alone, `begin` and a call for each layer."""

    def plan(self, slots: Sequence[NDArray[np.int64]]) -> None:
        """The next step has these sessions: of each the slots of its committed tokens, in order of position, and its nodes."""

    def begin(self, rows: BucketRows) -> None:
        """The next calls, one for each layer, are for these rows."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the rows' keys and values [rows, KV heads, size], attend with queries [rows, heads, size]; as queries."""


MakeAttention = Callable[[BucketShape], BucketAttention]
"""Makes a bucket's attention."""


class _Masked(NamedTuple):
    """A step's rows, and their additive mask [sessions, nodes, context + nodes]."""

    rows: BucketRows
    mask: Tensor


class SdpaAttention:
    """PyTorch's own, over copies of all keys and values that a bucket has room for."""

    def __init__(self, store: KvStore, dtype: torch.dtype) -> None:
        self._store = store
        self._dtype = dtype
        self._masked: _Masked | None = None

    def plan(self, slots: Sequence[NDArray[np.int64]]) -> None:
        """Nothing has to be planned."""

    def begin(self, rows: BucketRows) -> None:
        """Make the mask."""
        num_nodes = rows.slots.shape[1]
        columns = torch.arange(rows.key_slots.shape[1] - num_nodes, device=rows.lengths.device)
        in_context = (columns < rows.lengths[:, None])[:, None].expand(-1, num_nodes, -1)
        seen = torch.cat((in_context, rows.visible), dim=-1)
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        self._masked = _Masked(rows, mask)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `BucketAttention` says."""
        assert self._masked is not None, "attention is called outside a step"
        rows, mask = self._masked
        self._store.write(layer, rows.slots.flatten(), key, value)
        stored = self._store.read(layer, rows.key_slots)
        queries = query.view(*mask.shape[:2], *query.shape[1:]).transpose(1, 2)
        keys, values = stored.keys.transpose(1, 2), stored.values.transpose(1, 2)
        return fused_core(queries, keys, values, mask, False, query.shape[-1] ** -0.5).transpose(1, 2).flatten(0, 1)
