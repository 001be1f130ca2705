"""This file is the acceptance walk: which nodes of a tree the target agrees with, and what is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treewire.core.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """Accepted nodes, root first, a path in the tree; and the token after the last of them, the bonus."""

    nodes: tuple[int, ...]
    next_token_id: int

    def token_ids(self, tree: DraftTree) -> tuple[int, ...]:
        """What is committed: the accepted tokens below the root, then the bonus."""
        return (*(tree.token_ids[node] for node in self.nodes[1:]), self.next_token_id)


def accept(tree: DraftTree, posterior: Sequence[int]) -> Acceptance:
    """Walk from the root along the target's own choices for as long as the tree contains them.

    `posterior[i]` is the target's choice after node i. Lossless: the committed tokens are the target's choices, the tree
    decides only how many of them are known in one forward. Raises ValueError if the lengths differ.
    """
    if len(posterior) != len(tree):
        raise ValueError(f"tree has {len(tree)} nodes, the posterior {len(posterior)}")
    nodes = [0]
    while (node := _child_with_token(tree, nodes[-1], posterior[nodes[-1]])) is not None:
        nodes.append(node)
    return Acceptance(tuple(nodes), posterior[nodes[-1]])


def _child_with_token(tree: DraftTree, node: int, token_id: int) -> int | None:
    return next((child for child in tree.children[node] if tree.token_ids[child] == token_id), None)
