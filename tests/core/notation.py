"""This file is trees as text: `a(b c(d))` is a root a with the children b and c, and d below c; a is token 0, b is 1."""

from __future__ import annotations

from treewire.core.tree import ROOT_PARENT, DraftTree


def tree(text: str) -> DraftTree:
    """The tree that the text draws, nodes in the order in which they are written."""
    token_ids: list[int] = []
    parents: list[int] = []
    ancestors = [ROOT_PARENT]
    for character in text:
        if character == "(":
            ancestors.append(len(token_ids) - 1)
        elif character == ")":
            ancestors.pop()
        elif character != " ":
            token_ids.append(token(character))
            parents.append(ancestors[-1])
    return DraftTree(tuple(token_ids), tuple(parents))


def text(drawn: DraftTree, node: int = 0) -> str:
    """The text that draws a tree, siblings in node order."""
    below = " ".join(text(drawn, child) for child in drawn.children[node])
    return chr(ord("a") + drawn.token_ids[node]) + (f"({below})" if below else "")


def token(letter: str) -> int:
    """The token id that a letter stands for."""
    return ord(letter) - ord("a")
