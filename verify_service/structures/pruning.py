"""This file is a tree as a structure leaves and grows it, and what the target said of that as an answer to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from treewire.core.acceptance import Acceptance
from treewire.core.tree import DraftTree, TokenLogProbs
from verify_service.engine import Distributions, NodeProbabilities, Posterior

NOT_COMPUTED = -1
"""The choice after a node that was not sent to the target."""


@dataclass(frozen=True)
class Pruning:
    """A tree, and those of its nodes that are left, in their order and with every ancestor; the root always is.

    Behind the `num_sent` nodes that were sent the tree may have others, grafted for what the structure forces.

    Acceptance sees the whole tree: the target's choices never lead to a node that was left out, but a rule that rejects drawn
    nodes must know that they were drawn.
    """

    tree: DraftTree
    nodes: tuple[int, ...]
    num_sent: int

    @cached_property
    def left(self) -> DraftTree:
        """The tree of the nodes that are left."""
        parents = (self.tree.parents[node] for node in self.nodes)
        return DraftTree(
            tuple(self.tree.token_ids[node] for node in self.nodes),
            tuple(self._place_of.get(parent, parent) for parent in parents),
        )

    @cached_property
    def _place_of(self) -> dict[int, int]:
        """The place among the nodes that are left, of each of them."""
        return {node: place for place, node in enumerate(self.nodes)}

    def spread(self, posterior: Posterior) -> Posterior:
        """What the target said of the nodes that are left, as an answer to the whole tree."""
        choices = [NOT_COMPUTED] * len(self.tree)
        probabilities = [NodeProbabilities((), ())] * len(self.tree) if posterior.node_probabilities else []
        for place, node in enumerate(self.nodes):
            choices[node] = posterior.token_ids[place]
            if probabilities:
                probabilities[node] = posterior.node_probabilities[place]
        return replace(
            posterior,
            token_ids=tuple(choices),
            node_probabilities=tuple(probabilities),
            features=None if posterior.features is None else self._spread_rows(posterior.features),
            distributions=None if posterior.distributions is None else _Spread(posterior.distributions, self._place_of),
        )

    def within(self, acceptance: Acceptance) -> Acceptance:
        """An acceptance of the whole tree as one of what is left. Raises ValueError if it has a node that was left out."""
        for node in acceptance.nodes:
            if node not in self._place_of:
                raise ValueError(f"node {node} is forbidden by the structure")
        return Acceptance(tuple(self._place_of[node] for node in acceptance.nodes), acceptance.next_token_id)

    def _spread_rows(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        spread = np.zeros((len(self.tree), rows.shape[1]), rows.dtype)
        spread[list(self.nodes)] = rows
        return spread


@dataclass(frozen=True)
class _Spread:
    """`verify_service.engine.Distributions` of a whole tree, of which some nodes were computed."""

    distributions: Distributions
    place_of: dict[int, int]

    def probabilities(self, node: int) -> NDArray[np.float64]:
        """The processed distribution after a node that is left."""
        return self.distributions.probabilities(self.place_of[node])

    def log_probs(self, nodes: Sequence[int], token_ids: Sequence[int], num_top: int) -> tuple[TokenLogProbs, ...]:
        """For each node the log-prob of the token after it, with the `num_top` likeliest; before any processing."""
        return self.distributions.log_probs([self.place_of[node] for node in nodes], token_ids, num_top)
