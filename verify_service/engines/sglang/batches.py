"""This file is how parts become the flat arrays of a forward: chains as they are, trees padded to a common width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.visibility import positions, visibility
from verify_service.engines.sglang.messages import Part

PADDING_SLOT = 0
"""SGLang's own slot for what nobody reads."""

_PADDING_TOKEN = 0

Ints = NDArray[np.int64]


class ChainBatch(NamedTuple):
    """Chunks of prompts. `token_ids`, `positions`, `slots` are [tokens], the others [parts]."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    rows: Ints
    prefix_lengths: Ints
    lengths: Ints


class TreeBatch(NamedTuple):
    """Trees of one width. `token_ids`, `positions`, `slots` are [parts x width], `rows` and `prefix_lengths` [parts].

    `visible` is bool [parts, width, width]: which nodes of its own tree each node sees. A padding node sees itself alone, has
    the root's position and writes to the padding slot; no real node sees it.
    """

    width: int
    token_ids: Ints
    positions: Ints
    slots: Ints
    rows: Ints
    prefix_lengths: Ints
    visible: NDArray[np.bool_]


class TableWrites(NamedTuple):
    """Entries of the table of KV slots to set before a forward, each [entries]."""

    rows: Ints
    columns: Ints
    slots: Ints


def width_for(widths: Sequence[int], num_nodes: int) -> int:
    """The narrowest width that holds a tree of that many nodes. Raises ValueError if none does."""
    for width in widths:
        if num_nodes <= width:
            return width
    raise ValueError(f"tree has {num_nodes:,} nodes, the widest that is captured has {widths[-1]:,}")


def chain_batch(parts: Sequence[Part]) -> ChainBatch:
    """One forward's arrays of chunks."""
    return ChainBatch(
        token_ids=_flat([part.token_ids for part in parts]),
        positions=np.concatenate([np.arange(p.prefix_length, p.prefix_length + len(p.token_ids)) for p in parts]),
        slots=_flat([part.own_slots for part in parts]),
        rows=_ints([part.row for part in parts]),
        prefix_lengths=_ints([part.prefix_length for part in parts]),
        lengths=_ints([len(part.token_ids) for part in parts]),
    )


def tree_batch(parts: Sequence[Part], width: int) -> TreeBatch:
    """One forward's arrays of trees, each padded to `width` nodes."""
    shape = (len(parts), width)
    token_ids = np.full(shape, _PADDING_TOKEN, np.int64)
    slots = np.full(shape, PADDING_SLOT, np.int64)
    node_positions = np.empty(shape, np.int64)
    visible = np.broadcast_to(np.eye(width, dtype=np.bool_), (*shape, width)).copy()
    for number, part in enumerate(parts):
        assert part.tree is not None
        size = len(part.tree)
        token_ids[number, :size] = part.tree.token_ids
        slots[number, :size] = part.own_slots
        node_positions[number] = part.prefix_length
        node_positions[number, :size] = positions(part.tree.depths, part.prefix_length)
        visible[number, :size, :size] = visibility(part.tree.parents)
    return TreeBatch(
        width=width,
        token_ids=token_ids.ravel(),
        positions=node_positions.ravel(),
        slots=slots.ravel(),
        rows=_ints([part.row for part in parts]),
        prefix_lengths=_ints([part.prefix_length for part in parts]),
        visible=visible,
    )


def table_writes(parts: Sequence[Part], width: int) -> TableWrites:
    """What the parts' rows must hold before the forward; a tree's row is padded with the padding slot up to `width`."""
    slots = [[*part.slots, *[PADDING_SLOT] * _num_padding(part, width)] for part in parts]
    return TableWrites(
        rows=np.concatenate([np.full(len(row), part.row) for part, row in zip(parts, slots, strict=True)]),
        columns=np.concatenate([np.arange(p.write_from, p.write_from + len(r)) for p, r in zip(parts, slots, strict=True)]),
        slots=_flat(slots),
    )


def num_padding(parts: Sequence[Part], width: int) -> int:
    """Padding nodes of the trees among the parts."""
    return sum(_num_padding(part, width) for part in parts)


def _num_padding(part: Part, width: int) -> int:
    return 0 if part.tree is None else width - len(part.tree)


def _flat(lists: Sequence[Sequence[int]]) -> Ints:
    return _ints([number for each in lists for number in each])


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)
