"""This file is tree attention over pages as a Triton kernel: what is read is what is seen, and nothing is copied.

A program has some of the rows that share a KV head, query heads of a group side by side, and goes through its session's
committed tokens by the page table, then through the tree under the mask of ancestors, with a running softmax in float32.
Long contexts of few rows are split among programs, whose parts a second kernel puts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from treewire.kv.store import KvStore
from verify_service.attention.bucket import BucketRows, BucketShape

_FEWEST_ROWS = 16  # of a matrix product
_MOST_ROWS = 64
_BLOCK_BYTES = 128  # of a block's keys, one column
_NUM_PROGRAMS = 256  # that a GPU wants, about
_SMALLEST_SPLIT = 256  # committed tokens
_MOST_SPLITS = 32
_NUM_STATISTICS = 2  # highest score, sum of weights


@triton.jit
def _fold(query, key, value, is_seen, scale, best, total, attended):  # type: ignore[no-untyped-def]
    """Take a block of keys into the running softmax. Rows that have seen nothing yet keep a best of -inf and a total of 0."""
    scores = tl.where(is_seen, tl.dot(query, key, input_precision="ieee") * scale, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - finite[:, None])
    shrink = tl.exp(best - finite)
    total = total * shrink + tl.sum(weights, 1)
    attended = attended * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return highest, total, attended


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,  # [sessions, nodes, heads, size]
    keys,  # [slots, KV heads, size]
    values,
    pages,  # int64 [sessions, pages]
    slots,  # int64 [sessions, nodes]
    lengths,  # int64 [sessions]
    visible,  # uint8 [sessions, nodes, nodes]
    out,  # as query if there is one split, else float32 [sessions, nodes, heads, splits, size]
    statistics,  # float32 [sessions, nodes, heads, splits, 2]
    scale,
    num_nodes,
    num_pages,
    GROUP: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
    PAGE_SIZE: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_KEYS: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
):
    """One block of rows of one KV head of one session, over one split of its context; the last split takes the tree too."""
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    session, split = tl.program_id(2) // NUM_SPLITS, tl.program_id(2) % NUM_SPLITS
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    nodes = rows // GROUP
    is_row = nodes < num_nodes
    heads = (session * num_nodes + nodes) * (num_kv_heads * GROUP) + kv_head * GROUP + rows % GROUP
    columns, block = tl.arange(0, BLOCK_SIZE), tl.arange(0, BLOCK_KEYS)
    is_column = columns < SIZE
    is_own = is_row[:, None] & is_column[None, :]
    own = tl.load(query + heads[:, None] * SIZE + columns[None, :], mask=is_own, other=0.0)
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    attended = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], tl.float32)

    length = tl.load(lengths + session)
    share = tl.cdiv(tl.cdiv(length, NUM_SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    stop = tl.minimum(length, (split + 1) * share)
    for start in range(split * share, stop, BLOCK_KEYS):
        positions = start + block
        is_key = positions < stop
        page = tl.load(pages + session * num_pages + positions // PAGE_SIZE, mask=is_key, other=0)
        places = ((page * PAGE_SIZE + positions % PAGE_SIZE) * num_kv_heads + kv_head) * SIZE
        key = tl.load(keys + places[None, :] + columns[:, None], mask=is_key[None, :] & is_column[:, None], other=0.0)
        value = tl.load(values + places[:, None] + columns[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0)
        best, total, attended = _fold(own, key, value, is_key[None, :], scale, best, total, attended)

    if split == NUM_SPLITS - 1:
        for first in range(0, num_nodes, BLOCK_KEYS):
            others = first + block
            is_key = others < num_nodes
            slot = tl.load(slots + session * num_nodes + others, mask=is_key, other=0)
            places = (slot * num_kv_heads + kv_head) * SIZE
            key = tl.load(keys + places[None, :] + columns[:, None], mask=is_key[None, :] & is_column[:, None], other=0.0)
            value = tl.load(values + places[:, None] + columns[None, :], mask=is_key[:, None] & is_column[None, :], other=0.0)
            pairs = (session * num_nodes + nodes[:, None]) * num_nodes + others[None, :]
            is_seen = tl.load(visible + pairs, mask=is_row[:, None] & is_key[None, :], other=0) != 0
            best, total, attended = _fold(own, key, value, is_seen, scale, best, total, attended)

    if NUM_SPLITS == 1:
        attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + heads[:, None] * SIZE + columns[None, :], attended.to(out.dtype.element_ty), mask=is_own)
    else:
        parts = heads * NUM_SPLITS + split
        tl.store(out + parts[:, None] * SIZE + columns[None, :], attended, mask=is_own)
        tl.store(statistics + parts * 2, best, mask=is_row)
        tl.store(statistics + parts * 2 + 1, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _together(  # type: ignore[no-untyped-def]
    parts,  # float32 [rows, splits, size]
    statistics,  # float32 [rows, splits, 2]
    out,  # [rows, size]
    SIZE: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
):
    """One row of one head from what its splits found. The last split has seen the row itself: its best is finite."""
    row, columns, splits = tl.program_id(0), tl.arange(0, BLOCK_SIZE), tl.arange(0, NUM_SPLITS)
    places = row * NUM_SPLITS + splits
    best, total = tl.load(statistics + places * 2), tl.load(statistics + places * 2 + 1)
    weights = tl.exp(best - tl.max(best, 0))
    is_column = columns < SIZE
    found = tl.load(parts + places[:, None] * SIZE + columns[None, :], mask=is_column[None, :], other=0.0)
    attended = tl.sum(found * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out + row * SIZE + columns, attended.to(out.dtype.element_ty), mask=is_column)


class _Paged(NamedTuple):
    """A step's rows, and their page table int64 [sessions, pages]."""

    rows: BucketRows
    pages: Tensor


class TritonAttention:
    """A bucket's attention by the kernel: `verify_service.attention.bucket.BucketAttention`."""

    def __init__(self, shape: BucketShape, store: KvStore, page_size: int) -> None:
        self._shape = shape
        self._store = store
        self._page_size = page_size
        self._paged: _Paged | None = None

    def plan(self, slots: Sequence[NDArray[np.int64]]) -> None:
        """Nothing has to be planned: programs read the lengths."""

    def begin(self, rows: BucketRows) -> None:
        """Make the page table, a page begins with the slot of its first position; lay the rest side by side."""
        rows = rows._replace(
            lengths=rows.lengths.contiguous(), slots=rows.slots.contiguous(), visible=rows.visible.to(torch.uint8).contiguous()
        )
        pages = rows.key_slots[:, : self._shape.context : self._page_size] // self._page_size
        self._paged = _Paged(rows, pages)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `BucketAttention` says."""
        assert self._paged is not None, "attention is called outside a step"
        rows, pages = self._paged
        self._store.write(layer, rows.slots.flatten(), key, value)
        stored, (num_sessions, num_nodes, _) = self._store.layer(layer), self._shape
        num_heads, size = query.shape[1:]
        num_kv_heads = key.shape[1]
        group = num_heads // num_kv_heads
        block_rows = min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(num_nodes * group)))
        num_blocks = triton.cdiv(num_nodes * group, block_rows)
        num_splits = splits_of(self._shape.context, num_blocks * num_kv_heads * num_sessions)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        shape = (*query.shape[:2], num_splits, size)
        parts = out if num_splits == 1 else query.new_empty(shape, dtype=torch.float32)
        statistics = query.new_empty((*shape[:-1], _NUM_STATISTICS), dtype=torch.float32)
        block_size = max(_FEWEST_ROWS, triton.next_power_of_2(size))
        _attend[num_blocks, num_kv_heads, num_sessions * num_splits](
            query.contiguous(),
            stored.keys,
            stored.values,
            pages,
            rows.slots,
            rows.lengths,
            rows.visible,
            parts,
            statistics,
            size**-0.5,
            num_nodes,
            pages.shape[1],
            GROUP=group,
            SIZE=size,
            PAGE_SIZE=self._page_size,
            NUM_SPLITS=num_splits,
            BLOCK_ROWS=block_rows,
            BLOCK_KEYS=_BLOCK_BYTES // query.element_size(),
            BLOCK_SIZE=block_size,
            num_stages=2,
        )
        if num_splits > 1:
            _together[len(query) * num_heads,](parts, statistics, out, SIZE=size, NUM_SPLITS=num_splits, BLOCK_SIZE=block_size)
        return out


def splits_of(context: int, num_programs: int) -> int:
    """How many programs share a context, a power of two: as many as a GPU wants, none of them for less than a little."""
    splits = 1
    while splits < _MOST_SPLITS and splits * num_programs < _NUM_PROGRAMS and context >= 2 * splits * _SMALLEST_SPLIT:
        splits *= 2
    return splits


def is_interpreted() -> bool:
    """Whether kernels are interpreted, on any device, as TRITON_INTERPRET has it."""
    return bool(triton.knobs.runtime.interpret)
