"""This file is the rules that an ablation compares: the tree that each builds after a token of the target's path.

Every tree is such that its acceptance is how far the path stays inside it. With shared noise that is the rule itself, for any
tree. Under hybrid acceptance the drawn tokens are random; here they are drawn given the path, from their exact law: a token x
of the target's that was drawn from q came as an accepted draw with probability min(1, q(x) / p(x)), else out of the residual.
So rounds along one path have the law that they have along paths of their own, and all rules are compared on the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import BranchWeights, BuiltTree, build_tree, perturb
from treewire.core.hybrid import MAX_DRAWN_TOKENS, Purpose, build_hybrid_tree, uniforms
from treewire.core.tree import DraftTree, Draw, Marginals

NO_TOKEN = 2**31 - 1  # in no vocabulary


@dataclass(frozen=True, eq=False)
class Spot:
    """What is known after a token of a path, at `position`: the drafter's marginals, and the tokens that will follow with the
    probabilities that the target gives them, float64 [following]."""

    marginals: Marginals
    seed: int
    temperature: float
    position: int
    following: tuple[int, ...]
    probabilities: NDArray[np.float64]


SpotRule = Callable[[int, Spot], DraftTree]


def plain_rule(budget: int) -> SpotRule:
    """Ranked by log-prob alone."""

    def build(root: int, spot: Spot) -> DraftTree:
        return build_tree(root, _cut(spot.marginals, budget + 1), budget).tree

    return build


def chain_rule(budget: int) -> SpotRule:
    """The best token of each depth, as the drafter ranks them."""

    def build(root: int, spot: Spot) -> DraftTree:
        return build_tree(root, _cut(spot.marginals, 1), budget).tree

    return build


def noise_rule(budget: int, *weights_by_depth: BranchWeights) -> SpotRule:
    """Aimed at the noise: the first weights are for depth 1, and so on, the last ones for all depths below."""

    def build(root: int, spot: Spot) -> DraftTree:
        return aimed_tree(root, spot, budget, weights_by_depth).tree

    return build


def aimed_tree(root: int, spot: Spot, budget: int, weights_by_depth: Sequence[BranchWeights]) -> BuiltTree:
    """The best tree by log-prob and noise, weighted."""
    marginals = _cut(spot.marginals, budget + 1)
    if not marginals.num_depths:
        return build_tree(root, marginals, budget)
    weights_here = [weights.at(spot.temperature) for weights in weights_by_depth]
    choices = [perturb(marginals, spot.seed, spot.position, weights) for weights in weights_here]
    which = np.minimum(marginals.row_depths, len(choices)) - 1
    scores = np.stack(choices)[which, np.arange(len(which))]
    return build_tree(root, marginals, budget, branch_scores=scores)


def hybrid_rule(budget: int, width: int) -> SpotRule:
    """Up to `width` children of a node, the last drawn."""

    def build(root: int, spot: Spot) -> DraftTree:
        marginals = _cut(spot.marginals, budget + MAX_DRAWN_TOKENS)
        tree = build_hybrid_tree(root, marginals, budget, width=width, seed=spot.seed, root_position=spot.position).tree
        token_ids = list(tree.token_ids)
        depths = np.arange(1, max(tree.depths) + 1)
        numbers = uniforms(spot.seed, spot.position + depths, Purpose.ACCEPT)
        for draw in tree.draws:
            step = tree.depths[draw.node] - 1
            token_ids[draw.node] = _drawn(draw, spot, step, float(numbers[step]))
        return DraftTree(tuple(token_ids), tree.parents)

    return build


def _drawn(draw: Draw, spot: Spot, step: int, number: float) -> int:
    """The path's token, if it came as an accepted draw; NO_TOKEN stands for every draw that is rejected."""
    if step >= len(spot.following) or spot.following[step] not in draw.token_ids:
        return NO_TOKEN
    token_id = spot.following[step]
    drawn_from = draw.probabilities[draw.token_ids.index(token_id)]
    return token_id if number * spot.probabilities[step] < drawn_from else NO_TOKEN


def _cut(marginals: Marginals, width: int) -> Marginals:
    """As many tokens of each row as the gateway asks for."""
    return Marginals(marginals.token_ids[:, :width], marginals.log_probs[:, :width], marginals.prefixes)
