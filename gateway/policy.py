"""This file is how a round's tree is chosen: the budget, the depth that still makes sense, and the branch scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import USUAL_WEIGHTS, BranchWeights, BuiltTree, build_tree, perturb
from treewire.core.hybrid import build_hybrid_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals


class SetWeights(NamedTuple):
    """The weights of branches that this gateway was told; None leaves one to the drafter."""

    log_prob: float | None = None
    noise: float | None = None

    def over(self, drafter: BranchWeights | None) -> BranchWeights:
        """These where they are set, then those that were fitted to the drafter, then the usual ones."""
        fitted = drafter or USUAL_WEIGHTS
        return BranchWeights(
            fitted.log_prob if self.log_prob is None else self.log_prob, fitted.noise if self.noise is None else self.noise
        )


@dataclass(frozen=True)
class TreePolicy:
    """A fixed budget. `length_limit` is the length at which the sequence ends at the latest, prompt included."""

    budget: int
    length_limit: int
    sampling: Sampling
    weights: BranchWeights = USUAL_WEIGHTS

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
        weights = self.weights.at(self.sampling.temperature)
        return perturb(marginals, self.sampling.seed, commit.length - 1, weights)


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
