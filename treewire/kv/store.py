"""This file is the KV store: for every layer, the keys and values of all slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LayerKv(NamedTuple):
    """One layer's keys [slots, KV heads, key size] and values [slots, KV heads, value size]."""

    keys: Tensor
    values: Tensor


class KvStore:
    """Keys and values by layer and slot. A layer's tensors are made at its first write, in the shape the model uses.

    One slot costs, in every layer, KV heads x (key size + value size) elements: see `bytes_per_token`. On a CPU the memory
    becomes resident only as slots are used.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._layers: dict[int, LayerKv] = {}

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot over all layers that have been written."""
        tensors = [tensor for layer in self._layers.values() for tensor in layer]
        return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)

    def resized(self, num_slots: int) -> KvStore:
        """An empty store of the same layers with another number of slots, its memory allocated."""
        store = KvStore(num_slots)
        for number, layer in self._layers.items():
            store._layers[number] = _make_layer(num_slots, layer.keys, layer.values)
        return store

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows [rows, KV heads, size] into slots [rows]."""
        if layer not in self._layers:
            self._layers[layer] = _make_layer(self.num_slots, keys, values)
        stored = self._layers[layer]
        stored.keys.index_copy_(0, slots, keys)
        stored.values.index_copy_(0, slots, values)

    @torch.inference_mode()
    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy the rows in slots `sources` to `destinations`, in every layer; all are read before any is written."""
        for layer in self._layers.values():
            for tensor in layer:
                tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def read(self, layer: int, slots: Tensor) -> LayerKv:
        """Copy of the rows in slots [any shape]: keys and values of shape [that shape, KV heads, size]."""
        stored = self._layers[layer]
        return LayerKv(*(tensor.index_select(0, slots.flatten()).view(*slots.shape, *tensor.shape[1:]) for tensor in stored))


def _make_layer(num_slots: int, keys: Tensor, values: Tensor) -> LayerKv:
    """Memory for `num_slots` rows like these."""
    return LayerKv(keys.new_empty(num_slots, *keys.shape[1:]), values.new_empty(num_slots, *values.shape[1:]))
