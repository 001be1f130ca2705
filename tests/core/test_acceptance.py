"""The acceptance walk against a naive one over sets of paths."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.notation import token, tree
from treewire.core.acceptance import accept
from treewire.core.tree import DraftTree


@st.composite
def trees_with_posterior(draw: st.DrawFn) -> tuple[DraftTree, list[int]]:
    """A tree in which siblings differ, and a choice after each of its nodes, all of few tokens so that they meet often."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 20))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 2)))
        if path not in paths:
            paths.append(path)
    drawn = DraftTree(tuple((9, *path)[-1] for path in paths), tuple(paths.index(path[:-1]) if path else -1 for path in paths))
    return drawn, draw(st.lists(st.integers(0, 3), min_size=len(paths), max_size=len(paths)))


@given(trees_with_posterior())
def test_walk(case: tuple[DraftTree, list[int]]) -> None:
    """The accepted path is the longest on which every token is the choice after the node before it; then comes the bonus."""
    drawn, posterior = case
    agreed = [
        path
        for path in map(drawn.path, range(len(drawn)))
        if all(posterior[parent] == drawn.token_ids[node] for parent, node in pairwise(path))
    ]
    acceptance = accept(drawn, posterior)
    assert acceptance.nodes == max(agreed, key=len)
    assert acceptance.next_token_id == posterior[acceptance.nodes[-1]]
    assert acceptance.token_ids(drawn) == tuple(posterior[node] for node in acceptance.nodes)


@pytest.mark.parametrize(
    ("drawing", "choices", "committed"),
    [
        ("a", "x", "x"),
        ("a(b c(d))", "xxxx", "x"),
        ("a(b c(d))", "cxdy", "cdy"),
        ("a(b c(d))", "bxdy", "bx"),
        ("a(b(c) c(b))", "cxxxx", "cx"),
    ],
)
def test_drawn(drawing: str, choices: str, committed: str) -> None:
    """Walks by hand: one choice after each node in the order of the drawing."""
    drawn = tree(drawing)
    acceptance = accept(drawn, [token(letter) for letter in choices])
    assert acceptance.token_ids(drawn) == tuple(token(letter) for letter in committed)


def test_refuses_another_length() -> None:
    """A posterior that does not fit the tree is refused with both lengths."""
    with pytest.raises(ValueError, match="tree has 2 nodes, the posterior 1"):
        accept(tree("a(b)"), [1])
