"""Visibility and positions against paths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.notation import tree
from treewire.core.tree import DraftTree
from treewire.core.visibility import positions, visibility


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree of up to 40 nodes."""
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 40))))]
    return DraftTree(tuple(range(len(parents))), tuple(parents))


@given(trees())
def test_sees_its_path(drawn: DraftTree) -> None:
    """A node sees exactly the nodes of its path, itself included."""
    visible = visibility(drawn.parents)
    assert visible.dtype == np.bool_
    assert visible.shape == (len(drawn), len(drawn))
    for node, row in enumerate(visible):
        assert tuple(np.flatnonzero(row)) == drawn.path(node)


def test_drawn() -> None:
    """A matrix by hand."""
    assert visibility(tree("a(b c(d))").parents).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 0, 1, 1],
    ]


def test_empty() -> None:
    """No node sees nothing: the empty end of a batch is no special case."""
    assert visibility(()).shape == (0, 0)


def test_writable() -> None:
    """The matrix is the caller's own."""
    assert visibility((-1, 0)).flags.writeable


@pytest.mark.parametrize("parents", [(-1, 1), (-1, -1), (-1, 0, 5)])
def test_refuses_a_parent_behind_its_child(parents: tuple[int, ...]) -> None:
    """Parents that make no tree are refused with the node."""
    with pytest.raises(ValueError, match="a parent comes before its children"):
        visibility(parents)


def test_positions() -> None:
    """A node's position is the root's plus its depth."""
    computed = positions(tree("a(b c(d))").depths, 2**33)
    assert (computed - 2**33).tolist() == [0, 1, 1, 2]
    assert computed.dtype == np.int64
