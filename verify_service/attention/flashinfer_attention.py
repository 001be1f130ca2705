"""This file is tree attention by FlashInfer, in its CUDA graph mode: planned on the host ahead of each step, replayed in it.

One wrapper serves all buckets of a number of sessions and nodes: its buffers are those of the longest context. FlashInfer plans
by lengths alone. The mask, which it would take from the host, is written on the device into the buffer that the wrapper reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewire.kv.store import KvStore
from verify_service.attention.bucket import BucketRows, BucketShape, Heads
from verify_service.attention.paged_plan import mask_words, most_pages, packed_mask, paged_plan

_BACKEND = "fa2"  # the one that takes masks
_LAYOUT = "NHD"
_TILE_ROWS = 128  # the largest tile of rows, and two blocks on each multiprocessor: what FlashInfer's scheduler counts with
_BLOCKS_PER_PROCESSOR = 2
_FLOAT_BYTES = 4
_SLACK_BYTES = 1 << 20  # of alignment


@dataclass(frozen=True, eq=False)
class Paging:
    """A store in pages, the last of which is handed out to nobody, and the memory that all of FlashInfer's steps share."""

    store: KvStore
    page_size: int
    workspace: Tensor

    @property
    def spare_page(self) -> int:
        """The one that what fills buckets writes to."""
        return self.store.num_slots // self.page_size - 1


class FlashInferAttention:
    """A bucket's attention by FlashInfer: `verify_service.attention.bucket.BucketAttention`."""

    def __init__(self, shape: BucketShape, planned: _Planned) -> None:
        self._shape = shape
        self._planned = planned
        self._rows: BucketRows | None = None

    def plan(self, slots: Sequence[NDArray[np.int64]]) -> None:
        """Have FlashInfer lay out the step, and write its numbers where the graph reads them."""
        self._planned.plan(slots)

    def begin(self, rows: BucketRows) -> None:
        """Write the mask where FlashInfer reads it."""
        self._rows = rows
        words = self._planned.mask_words[: self._shape.num_sessions * mask_words(self._shape)]
        words.copy_(packed_mask(rows, self._shape).flatten())
        torch.mul(self._planned.numbers, mask_words(self._shape) * words.itemsize, out=self._planned.mask_starts)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `BucketAttention` says."""
        assert self._rows is not None, "attention is called outside a step"
        self._planned.paging.store.write(layer, self._rows.slots.flatten(), key, value)
        return self._planned.run(layer, query)


class _Planned:
    """A wrapper of FlashInfer's for one number of sessions and nodes, with the buffers that it reads."""

    def __init__(self, shape: BucketShape, paging: Paging, heads: Heads, dtype: torch.dtype) -> None:
        self.paging = paging
        self._shape, self._heads, self._dtype = shape, heads, dtype
        device = paging.workspace.device

        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self.mask_words = numbers(shape.num_sessions * mask_words(shape))
        self.mask_starts = numbers(shape.num_sessions + 1)
        self.numbers = torch.arange(shape.num_sessions + 1, dtype=torch.int32, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            paging.workspace,
            _LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf=numbers(shape.num_sessions + 1),
            paged_kv_indptr_buf=numbers(shape.num_sessions + 1),
            paged_kv_indices_buf=numbers(most_pages(shape, paging.page_size)),
            paged_kv_last_page_len_buf=numbers(shape.num_sessions),
            custom_mask_buf=self.mask_words.view(torch.uint8),
            mask_indptr_buf=self.mask_starts,
            backend=_BACKEND,
        )

    def plan(self, slots: Sequence[NDArray[np.int64]]) -> None:
        """Lay out a step. Without a mask in the call: FlashInfer takes what is in the wrapper's buffer."""
        plan = paged_plan(slots, self._shape, self.paging.page_size, self.paging.spare_page)
        self._wrapper.plan(
            *(torch.from_numpy(numbers) for numbers in plan),
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._heads.size,
            self.paging.page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attend with queries [rows, heads, size] to what the store holds of a layer."""
        pages = tuple(tensor.view(-1, self.paging.page_size, *tensor.shape[1:]) for tensor in self.paging.store.layer(layer))
        attended: Tensor = self._wrapper.run(query.contiguous(), pages)
        return attended


class FlashInferBuckets:
    """`verify_service.attention.bucket.MakeAttention` for buckets whose longest context is `max_context`."""

    def __init__(self, paging: Paging, heads: Heads, dtype: torch.dtype, max_context: int) -> None:
        self._paging = paging
        self._heads = heads
        self._dtype = dtype
        self._max_context = max_context
        self._planned: dict[tuple[int, int], _Planned] = {}

    def __call__(self, shape: BucketShape) -> FlashInferAttention:
        """The attention of a bucket."""
        size = shape.num_sessions, shape.num_nodes
        if size not in self._planned:
            longest = shape._replace(context=self._max_context)
            self._planned[size] = _Planned(longest, self._paging, self._heads, self._dtype)
        return FlashInferAttention(shape, self._planned[size])


def workspace_bytes(heads: Heads, num_sessions: int, num_nodes: int, num_processors: int) -> int:
    """What FlashInfer's scheduler puts into its workspace at most, for the largest bucket on so many multiprocessors.

    In float32, of each query head and of each row of its tiles, what a split found and the logarithm of its sum.
    """
    num_rows = num_sessions * (num_nodes * (heads.num_heads // heads.num_kv_heads) + _TILE_ROWS)
    num_rows = max(num_rows, _BLOCKS_PER_PROCESSOR * num_processors // heads.num_kv_heads * _TILE_ROWS)
    return heads.num_heads * num_rows * (heads.size + 1) * _FLOAT_BYTES + _SLACK_BYTES
