"""This file is how a round's tree is chosen: the budget, the depth that still makes sense, and the branch scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import BuiltTree, build_tree, perturb
from treewire.core.hybrid import build_hybrid_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals


@dataclass(frozen=True)
class BranchWeights:
    """What a drafter's log-prob and the shared noise count in the ranking of branches; `treewire calibrate` fits them."""

    log_prob: float = 0.7
    noise: float = 0.5


@dataclass(frozen=True)
class TreePolicy:
    """A fixed budget. `length_limit` is the length at which the sequence ends at the latest, prompt included."""

    budget: int
    length_limit: int
    sampling: Sampling
    weights: BranchWeights = BranchWeights()

    def max_depth(self, commit: Commit) -> int:
        """How deep the round's tree may be for all its tokens to be emitted: a tree of depth d gives at most d + 1."""
        return max(0, self.length_limit - commit.length - 1)

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        """The round's tree: best first from the drafter's marginals, no deeper than tokens can still be emitted."""
        return build_tree(
            commit.bonus_token_id,
            marginals,
            self.budget,
            max_depth=self.max_depth(commit),
            branch_scores=self._branch_scores(commit, marginals),
        )

    def _branch_scores(self, commit: Commit, marginals: Marginals) -> NDArray[np.float64] | None:
        if self.sampling.is_greedy or marginals.num_depths == 0:
            return None
        return perturb(
            marginals,
            self.sampling.seed,
            commit.length - 1,
            log_prob_weight=self.weights.log_prob,
            noise_weight=self.weights.noise,
        )


@dataclass(frozen=True)
class HybridPolicy:
    """A fixed budget, for hybrid acceptance: the last of at most `width` children of a node is drawn at random."""

    budget: int
    length_limit: int
    sampling: Sampling
    width: int

    def build(self, commit: Commit, marginals: Marginals) -> BuiltTree:
        """The round's tree, no deeper than tokens can still be emitted."""
        return build_hybrid_tree(
            commit.bonus_token_id,
            marginals,
            self.budget,
            width=self.width,
            seed=self.sampling.seed,
            root_position=commit.length - 1,
            max_depth=max(0, self.length_limit - commit.length - 1),
        )
