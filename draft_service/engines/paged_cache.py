"""This file is the paged store as `transformers` sees it: a cache of one sequence for one forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from treewire.kv.store import KvStore


class PagedCache(Cache):  # type: ignore[misc]
    """Keys and values in a store: `slots` int64 are those of all positions, the last `num_new` of them still to be written."""

    def __init__(self, store: KvStore, slots: Tensor, num_layers: int, num_new: int) -> None:
        super().__init__(layers=[_PagedLayer(store, layer, slots, num_new) for layer in range(num_layers)])


class _PagedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of it; its own tensors stay empty."""

    def __init__(self, store: KvStore, layer: int, slots: Tensor, num_new: int) -> None:
        super().__init__()
        self._store, self._layer, self._slots = store, layer, slots
        self._num_known = len(slots) - num_new

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new rows [1, KV heads, new, size]; the rows of all positions, [1, KV heads, positions, size]."""
        new = self._slots[self._num_known :]
        self._store.write(self._layer, new, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        rows = self._store.read(self._layer, self._slots)
        return rows.keys.transpose(0, 1)[None], rows.values.transpose(0, 1)[None]

    def get_seq_length(self) -> int:
        """Positions that were known before the forward."""
        return self._num_known
