"""This file is what a node sees: derived from the parents alone, for the mask and the positions of a target's forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def visibility(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Which nodes each node sees: itself and its ancestors. Bool [nodes, nodes], row = the node that looks.

    Raises ValueError if a parent does not come before its child; node 0 is the root, whatever its parent says.
    """
    seen = [1] if parents else []
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; a parent comes before its children")
        seen.append(seen[parent] | 1 << node)
    return _unpacked(seen)


def positions(depths: Sequence[int], root_position: int) -> NDArray[np.int64]:
    """Absolute position of each node in the sequence: the root's plus the node's depth. Int64 [nodes]."""
    return np.asarray(depths, np.int64) + root_position


def _unpacked(rows: Sequence[int]) -> NDArray[np.bool_]:
    """A square matrix from its rows as bit sets, column i in bit i."""
    num_bytes = (len(rows) + 7) // 8
    packed = np.frombuffer(b"".join(row.to_bytes(num_bytes, "little") for row in rows), np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), num_bytes), axis=1, count=len(rows), bitorder="little")
    return bits.view(np.bool_)
