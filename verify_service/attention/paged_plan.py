"""This file is a bucket as FlashInfer's paged attention wants to be told of it: where rows and pages begin, and a mask of bits.

The layouts are those of `BatchPrefillWithPagedKVCacheWrapper` (flashinfer 0.6.18 to 0.7.2): of session i the rows from
row_starts[i] on see the keys in pages[page_starts[i] : page_starts[i + 1]], the last being filled to last_page_lengths[i]. Bit
q * keys + k, least significant first, counted from the session's first byte, says whether row q sees key k. Words of 32 bits
are such bytes where the machine is little-endian, as CUDA devices are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_service.attention.bucket import BucketRows, BucketShape

_WORD_BITS = 32


class PagedPlan(NamedTuple):
    """The numbers of a step on the host, int32: [sessions + 1], [sessions + 1], [pages of all sessions], [sessions]."""

    row_starts: NDArray[np.int32]
    page_starts: NDArray[np.int32]
    pages: NDArray[np.int32]
    last_page_lengths: NDArray[np.int32]


def paged_plan(slots: Sequence[NDArray[np.int64]], shape: BucketShape, page_size: int, spare_page: int) -> PagedPlan:
    """Of sessions whose committed tokens and nodes have these slots, in order of position; what fills the bucket sees one slot
    of the spare page."""
    spare = np.array([spare_page * page_size], np.int64)
    filled = [*slots, *[spare] * (shape.num_sessions - len(slots))]
    pages = [own[::page_size] // page_size for own in filled]
    lengths = np.array([len(own) for own in filled])
    return PagedPlan(
        np.arange(shape.num_sessions + 1, dtype=np.int32) * np.int32(shape.num_nodes),
        np.cumsum([0, *map(len, pages)], dtype=np.int32),
        np.concatenate(pages).astype(np.int32),
        ((lengths - 1) % page_size + 1).astype(np.int32),
    )


def most_pages(shape: BucketShape, page_size: int) -> int:
    """Pages that a plan of a bucket has at most."""
    return shape.num_sessions * -(-(shape.context + shape.num_nodes) // page_size)


def mask_words(shape: BucketShape) -> int:
    """Words of one session's mask, whatever its length: each has as many, so that none moves."""
    return -(-shape.num_nodes * (shape.context + shape.num_nodes) // _WORD_BITS)


def packed_mask(rows: BucketRows, shape: BucketShape) -> Tensor:
    """What the bucket's rows see, as bits, int32 [sessions, words of a mask]; made on the device, by the shape alone.

    A row sees all committed tokens and its ancestors. A session has `lengths` + `counts` keys; what fills a bucket has one.
    """
    numbers = torch.arange(shape.num_nodes, device=rows.lengths.device)
    num_keys = rows.lengths + rows.counts
    bits = numbers[:, None] * num_keys[:, None, None] + rows.lengths[:, None, None] + numbers
    is_hidden = ~rows.visible & (numbers < rows.counts[:, None, None])
    ones = (is_hidden.long() << bits % _WORD_BITS).to(torch.int32)
    hidden = ones.new_zeros(shape.num_sessions, mask_words(shape))
    return hidden.scatter_add_(1, bits.flatten(1) // _WORD_BITS, ones.flatten(1)).bitwise_not_()
