"""This file is the builder: from marginals to the draft tree of the best prefixes under a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.noise import noise_at
from treewire.core.tree import ROOT_PARENT, DraftTree, Marginals

MISSING = math.inf
LARGEST_WEIGHT = 10.0  # above it a branch is all or nothing


@dataclass(frozen=True)
class BranchWeights:
    """What a drafter's log-prob and the shared noise count in the ranking of branches at temperature 1; less below (see `at`).
    `treewire calibrate` fits them.

    Any weights are lossless, the defaults suit a weak drafter. Raises ValueError unless 0 < `log_prob` <= LARGEST_WEIGHT and
    0 <= `noise` <= LARGEST_WEIGHT.
    """

    log_prob: float = 0.7
    noise: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.log_prob <= LARGEST_WEIGHT:
            raise ValueError(f"log_prob_weight is {self.log_prob}, it must be above 0 and at most {LARGEST_WEIGHT:g}")
        if not 0.0 <= self.noise <= LARGEST_WEIGHT:
            raise ValueError(f"noise_weight is {self.noise}, it must be from 0 to {LARGEST_WEIGHT:g}")

    def at(self, temperature: float) -> BranchWeights:
        """The weights at a temperature above 0: in proportion to it up to 1, since log-probs there have been divided by it.

        So trees go over into those of greedy decoding as the temperature goes to 0, and how far the drafter is to be trusted
        stays the same. Raises ValueError for temperature 0, at which there is no noise to weigh.
        """
        share = min(temperature, 1.0)
        return BranchWeights(share * self.log_prob, share * self.noise)


USUAL_WEIGHTS = BranchWeights()


@dataclass(frozen=True)
class BuiltTree:
    """A draft tree with what its builder knows of each node; nodes are in the order in which they were chosen.

    `scores` are the drafter's cumulative log-probs, 0.0 for the root, whatever scores the tree was grown by. `ranks` are the
    nodes' ranks among the tokens of their row of marginals, 0 the best; 0 for the root. `width` is that of the marginals.
    """

    tree: DraftTree
    scores: tuple[float, ...]
    ranks: tuple[int, ...]
    width: int

    @property
    def exact(self) -> bool:
        """The exactness certificate: no node used the last shipped rank of its row.

        True means that this is also the best tree of its own size from marginals of any greater width, full width included,
        provided that what was not shipped ranks behind what was. False claims nothing: the tree may still be the best. It
        speaks of the width of rows, not of their number: conditional rows for more prefixes may give another tree.
        """
        return all(rank < self.width - 1 for rank in self.ranks[1:])

    def cut(self, budget: int) -> BuiltTree:
        """The tree that a smaller budget builds from the same marginals: the root and the first `budget` nodes."""
        tree = self.tree.cut(budget)
        return BuiltTree(tree, self.scores[: len(tree)], self.ranks[: len(tree)], self.width)

    def grafted(self, token_ids: Sequence[int], parents: Sequence[int]) -> BuiltTree:
        """The tree with more nodes behind its own, which are taken for certain: they score what their parents do.

        Raises ValueError if a parent is not before its child.
        """
        if not token_ids:
            return self
        tree = DraftTree((*self.tree.token_ids, *token_ids), (*self.tree.parents, *parents), self.tree.draws)
        scores = list(self.scores)
        for parent in parents:
            scores.append(scores[parent])
        return BuiltTree(tree, tuple(scores), (*self.ranks, *[0] * len(token_ids)), self.width)


def build_tree(
    root_token_id: int,
    marginals: Marginals,
    budget: int,
    *,
    max_depth: int | None = None,
    branch_scores: NDArray[np.float64] | None = None,
) -> BuiltTree:
    """The best `budget` prefixes by the sum of their log-probs: DDTree, Ringel & Romano, arXiv 2604.12989.

    Sums are float64, in the order of the path; log-probs above 0 (rounding) count as 0; a token of log-prob -inf is never in
    the tree. Equals: the lexicographically smaller rank tuple, a prefix ahead of its extension. The tree has fewer nodes if
    the marginals have no more prefixes of at most `max_depth`. A smaller budget builds the first nodes of a larger one.

    Where marginals are conditional, children come from the row of their parent's path, else from that of their depth; order,
    ranks (within the row) and nesting are the same.

    `branch_scores`, [rows, width], replace the log-probs as what prefixes are ranked by. Each row counts less the log-sum-exp
    of its scores: then no score is above 0, none grows along a path, and the tree stays prefix-closed and nested.
    Raises ValueError on a negative token, budget or depth and on branch scores of another shape, NaN or +inf.
    """
    depth_limit = _at_least_zero("budget", budget)
    if max_depth is not None:
        depth_limit = min(depth_limit, _at_least_zero("max_depth", max_depth))
    return _grow(root_token_id, _ranked(marginals, branch_scores, depth_limit, budget), budget, marginals.width)


def perturb(marginals: Marginals, seed: int, root_position: int, weights: BranchWeights = USUAL_WEIGHTS) -> NDArray[np.float64]:
    """Branch scores that aim a tree at the sample which the target is about to draw: log-prob and shared noise, weighted.

    Float64 [rows, width]; a row of depth d holds tokens for the position `root_position` + d.
    """
    positions = root_position + marginals.row_depths[:, np.newaxis]
    noise = noise_at(seed, positions, marginals.token_ids)
    return weights.log_prob * marginals.log_probs.astype(np.float64) + weights.noise * noise


class _Ranked(NamedTuple):
    """Tokens of each row, best first. A cost is a negated branch score; past the last token of a row it is MISSING.

    The last row is one without tokens. The first `num_depths` are the rows of depths; `conditional` are those of paths.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]
    costs: list[list[float]]
    num_depths: int
    conditional: dict[tuple[int, ...], int]
    depth_limit: int

    def row_below(self, path: tuple[int, ...]) -> int:
        """The row of the children of the node with this path of tokens."""
        if len(path) >= self.depth_limit:
            return -1
        return self.conditional.get(path, len(path) if len(path) < self.num_depths else -1)


def _ranked(marginals: Marginals, branch_scores: NDArray[np.float64] | None, depth_limit: int, num_ranks: int) -> _Ranked:
    log_probs = np.minimum(marginals.log_probs.astype(np.float64), 0.0)
    costs = -log_probs if branch_scores is None else _branch_costs(marginals, branch_scores)
    order = np.lexsort((marginals.token_ids, costs))[:, :num_ranks]
    ranked_costs = np.pad(np.take_along_axis(costs, order, 1), ((0, 1), (0, 1)), constant_values=MISSING)
    return _Ranked(
        np.take_along_axis(marginals.token_ids, order, 1).tolist(),
        np.take_along_axis(log_probs, order, 1).tolist(),
        ranked_costs.tolist(),
        marginals.num_depths,
        {prefix: row for row, prefix in enumerate(marginals.prefixes, start=marginals.num_depths)},
        depth_limit,
    )


def _branch_costs(marginals: Marginals, branch_scores: NDArray[np.float64]) -> NDArray[np.float64]:
    if branch_scores.shape != marginals.log_probs.shape:
        raise ValueError(f"branch scores have shape {branch_scores.shape}, the marginals {marginals.log_probs.shape}")
    if not (branch_scores < math.inf).all():  # also catches NaN
        raise ValueError("branch scores are below infinity, these have +inf or NaN")
    scores = np.where(marginals.log_probs == -math.inf, -math.inf, branch_scores.astype(np.float64))
    totals = np.logaddexp.reduce(scores, axis=1, keepdims=True, initial=-math.inf)
    totals[totals == -math.inf] = 0.0  # a row without any token: all of it stays infinitely costly
    costs: NDArray[np.float64] = np.maximum(totals - scores, 0.0)
    return costs


_Offer = tuple[float, tuple[int, ...], int]  # cost, path as ranks, parent: heap order is by cost, then by path


def _grow(root_token_id: int, ranked: _Ranked, budget: int, width: int) -> BuiltTree:
    """Best first: of the prefixes on offer take the best, then offer its next sibling and its first child."""
    token_ids, parents, scores, ranks, costs = [root_token_id], [ROOT_PARENT], [0.0], [0], [0.0]
    paths: list[tuple[int, ...]] = [()]  # of each node, as tokens
    rows_below = [ranked.row_below(())]  # of each node, the row that its children are in
    offers: list[_Offer] = []

    def offer(path: tuple[int, ...], parent: int) -> None:
        cost = costs[parent] + ranked.costs[rows_below[parent]][path[-1]]
        if cost < MISSING:
            heappush(offers, (cost, path, parent))

    offer((0,), 0)
    while offers and len(parents) <= budget:
        cost, path, parent = heappop(offers)
        row, rank, node = rows_below[parent], path[-1], len(parents)
        token_ids.append(ranked.token_ids[row][rank])
        parents.append(parent)
        scores.append(scores[parent] + ranked.log_probs[row][rank])
        ranks.append(rank)
        costs.append(cost)
        paths.append((*paths[parent], token_ids[node]))
        rows_below.append(ranked.row_below(paths[node]))
        offer((*path[:-1], rank + 1), parent)
        offer((*path, 0), node)
    return BuiltTree(DraftTree(tuple(token_ids), tuple(parents)), tuple(scores), tuple(ranks), width)


def _at_least_zero(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}, it must be at least 0")
    return value
