"""Trees, their notation and the marginals that they are built from."""

import numpy as np
import pytest

from tests.core.notation import text, tree
from treewire.core.tree import Commit, DraftTree, Marginals


@pytest.mark.parametrize("drawing", ["a", "a(b)", "a(b c(d))", "a(b(c d(e)) f(g) h)"])
def test_notation_round_trip(drawing: str) -> None:
    """A drawn tree reads back as the same drawing."""
    assert text(tree(drawing)) == drawing


def test_derived_from_parents() -> None:
    """Depths, children and paths follow from the parents alone."""
    drawn = tree("a(b c(d))")
    assert drawn.parents == (-1, 0, 0, 2)
    assert drawn.depths == (0, 1, 1, 2)
    assert drawn.children == ((1, 2), (), (3,), ())
    assert drawn.path(3) == (0, 2, 3)
    assert (len(drawn), drawn.num_draft_tokens) == (4, 3)


def test_cut() -> None:
    """A cut keeps the root and the first nodes, and a cut beyond the tree is the tree."""
    drawn = tree("a(b c(d))")
    assert [text(drawn.cut(budget)) for budget in range(5)] == ["a", "a(b)", "a(b c)", "a(b c(d))", "a(b c(d))"]
    with pytest.raises(ValueError, match="budget is -2"):
        drawn.cut(-2)


@pytest.mark.parametrize(
    ("token_ids", "parents", "reason"),
    [
        ((), (), "no node"),
        ((1,), (0,), "parent -1"),
        ((1, 2), (-1,), "1 parents"),
        ((1, -2), (-1, 0), "token ids start at 0"),
        ((1, 2), (-1, 1), "parent 1"),
        ((1, 2), (-1, -1), "parent -1"),
    ],
)
def test_no_tree(token_ids: tuple[int, ...], parents: tuple[int, ...], reason: str) -> None:
    """What is no tree cannot be held, and the reason names the value."""
    with pytest.raises(ValueError, match=reason):
        DraftTree(token_ids, parents)


def test_no_commit() -> None:
    """A commit has tokens, no negative ones, and cannot be longer than its sequence."""
    for token_ids, length in (((), 1), ((-1,), 1), ((1, 2), 1)):
        with pytest.raises(ValueError, match="commit"):
            Commit(token_ids, length)


def test_marginals_of_no_rows() -> None:
    """No rows, and rows without a token, are marginals too."""
    assert (Marginals.from_rows([]).num_depths, Marginals.from_rows([]).width) == (0, 0)
    assert (Marginals.from_rows([[], []]).num_depths, Marginals.from_rows([[], []]).width) == (2, 0)


@pytest.mark.parametrize(
    ("token_ids", "log_probs", "reason"),
    [
        ([[1, 2]], [[-1.0]], "shape"),
        ([[-1, 2]], [[-1.0, -2.0]], "start at 0"),
        ([[1, 2]], [[0.5, -2.0]], "at most 0"),
        ([[1, 2]], [[float("nan"), -2.0]], "NaN"),
        ([[2, 2]], [[-1.0, -2.0]], "twice"),
    ],
)
def test_no_marginals(token_ids: list[list[int]], log_probs: list[list[float]], reason: str) -> None:
    """Malformed marginals cannot be held."""
    with pytest.raises(ValueError, match=reason):
        Marginals(np.array(token_ids, np.int32), np.array(log_probs, np.float32))
