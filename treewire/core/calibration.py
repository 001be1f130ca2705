"""This file is how the weights of branch scores are found: from recorded rounds, by maximum likelihood.

A round shows choices: after an accepted node the target took one of the tokens on offer, with the noise that is known. The
weights a, b that make `a log q + b g` the best predictor of these choices are those of a conditional logit (McFadden 1974).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import LARGEST_WEIGHT, BranchWeights
from treewire.core.noise import noise_at
from treewire.core.tree import DraftTree

FEWEST_CHOICES = 20
_LOWEST_WEIGHT = 0.01
_NUM_NEWTON_STEPS = 50
_RIDGE = 1e-3


class Choice(NamedTuple):
    """Tokens on offer after one node: drafter's log-prob and noise of each, float64 [tokens, 2], and the one that was taken.

    Both are times the temperature, up to 1, as weights are (`BranchWeights.at`).

    `depth` is that of the tokens, 1 that of the root's children.
    """

    features: NDArray[np.float64]
    taken: int
    depth: int = 1


def choices_of_round(
    tree: DraftTree, scores: Sequence[float], committed: Sequence[int], seed: int, root_position: int, temperature: float
) -> Iterator[Choice]:
    """The choices that a round shows: one for each committed token that its tree offered among others.

    `scores` are the nodes' cumulative log-probs, `committed` the round's tokens, the bonus included.
    """
    node = 0
    for depth, token_id in enumerate(committed, start=1):
        offered = tree.children[node]
        token_ids = [tree.token_ids[child] for child in offered]
        if token_id not in token_ids:
            return
        taken = token_ids.index(token_id)
        if len(offered) > 1:
            log_probs = [scores[child] - scores[node] for child in offered]
            noise = noise_at(seed, root_position + depth, token_ids)
            yield Choice(min(temperature, 1.0) * np.column_stack([log_probs, noise]).astype(np.float64), taken, depth)
        node = offered[taken]


def fit(choices: Iterable[Choice]) -> BranchWeights:
    """The weights under which the choices taken are likeliest; not below 0.01 and 0, and scaled to at most LARGEST_WEIGHT.

    Raises ValueError if there are fewer than FEWEST_CHOICES choices.
    """
    seen = list(choices)
    if len(seen) < FEWEST_CHOICES:
        raise ValueError(f"{len(seen)} choices were recorded, at least {FEWEST_CHOICES} are needed")
    weights = np.array([1.0, 1.0])
    for _ in range(_NUM_NEWTON_STEPS):
        gradient, curvature = -_RIDGE * (weights - 1.0), _RIDGE * np.eye(2)
        for choice in seen:
            shares = _softmax(choice.features @ weights)
            mean = shares @ choice.features
            gradient = gradient + choice.features[choice.taken] - mean
            curvature = curvature + (choice.features * shares[:, np.newaxis]).T @ choice.features - np.outer(mean, mean)
        step = np.linalg.solve(curvature, gradient)
        weights = weights + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-6:
            break
    weights = weights * min(1.0, LARGEST_WEIGHT / float(np.abs(weights).max()))
    return BranchWeights(max(_LOWEST_WEIGHT, float(weights[0])), max(0.0, float(weights[1])))


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares
