"""This file is hybrid acceptance, for randomness that the drafter does not share: at each node some likely children and one
that was drawn, accepted by rejection sampling.

After the greedy-n drafting of MDSD (arXiv 2502.18779) with the acceptance of Leviathan et al. (2023): with no child but the
drawn one it is chain rejection sampling. Lossless for any distribution that is drawn from, one cut to a few tokens included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.acceptance import Acceptance
from treewire.core.build import BuiltTree, build_tree
from treewire.core.noise import MAX_SEED, noise_integers
from treewire.core.tree import DraftTree, Draw, Marginals

MAX_DRAWN_TOKENS = 16
_SALT = 0x5851F42D4C957F2D  # keeps these numbers apart from the shared noise of the same seed
_UNIFORM_BITS = 53


class Purpose(IntEnum):
    """What a random number decides. Numbers of different purposes are independent."""

    DRAW = 0
    ACCEPT = 1
    RESIDUAL = 2


def uniforms(seed: int, positions: NDArray[np.int64], purpose: Purpose) -> NDArray[np.float64]:
    """A number in (0, 1) for the token at each of some absolute positions, a function of its arguments; float64 [positions]."""
    bits = noise_integers((seed ^ _SALT) & MAX_SEED, positions, np.array([purpose], np.int64))
    numerators = bits >> (64 - _UNIFORM_BITS) & (1 << _UNIFORM_BITS) - 1
    return np.asarray((numerators + 0.5) * 2.0**-_UNIFORM_BITS, np.float64)


def pick(weights: NDArray[np.float64], numbers: NDArray[np.float64]) -> NDArray[np.int64]:
    """The index that a number in (0, 1) picks from each row of weights [rows, indices], by their running sum; int64 [rows].

    Never one of weight 0, in a row that has others.
    """
    reached = np.cumsum(weights, axis=1)
    picked = (reached <= numbers[:, np.newaxis] * reached[:, -1:]).sum(axis=1)
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(picked, last), np.int64)


def choose_after_draw(
    drawn_token_ids: NDArray[np.int64],
    drawn_from: NDArray[np.float64],
    target: NDArray[np.float64],
    accept_numbers: NDArray[np.float64],
    residual_numbers: NDArray[np.float64],
) -> NDArray[np.int64]:
    """The rule at nodes with a drawn child, one a row; int64 [rows]: the token that follows each node.

    `drawn_from` q and `target` p are [rows, vocabulary], the numbers uniform in (0, 1). The drawn token Y is accepted with
    probability min(1, p(Y) / q(Y)); else the token comes from (p - q)+, renormalised.
    If Y was drawn from q this is a sample of p.
    """
    rows = np.arange(len(target))
    target = target / target.sum(axis=1, keepdims=True)
    residual = np.maximum(target - drawn_from, 0.0)
    thresholds = target[rows, drawn_token_ids] / drawn_from[rows, drawn_token_ids]
    accepted = (accept_numbers < thresholds) | ~residual.any(axis=1)  # without a residual p is q but for rounding
    return np.where(accepted, drawn_token_ids, pick(residual, residual_numbers))


def build_hybrid_tree(
    root_token_id: int,
    marginals: Marginals,
    budget: int,
    *,
    width: int,
    seed: int,
    root_position: int,
    max_depth: int | None = None,
) -> BuiltTree:
    """The best tree whose nodes have up to `width` children: the likeliest `width` - 1 tokens of the depth, and one drawn.

    The drawn one comes from the next MAX_DRAWN_TOKENS tokens of the depth, renormalised; it is one token for the whole depth,
    which is sound since a walk consults a depth once. The shape depends on the marginals alone: the place of the drawn token
    is ranked by the probability of all that it is drawn from, which is also its score. Raises ValueError on a width below 1,
    and on conditional marginals: what a drawn token is followed by would then depend on the draw, and the shape with it.
    """
    if width < 1:
        raise ValueError(f"width is {width}, it must be at least 1")
    if marginals.prefixes:
        raise ValueError("marginals are conditional, hybrid trees are built from marginals by depth alone")
    numbers = uniforms(seed, root_position + 1 + np.arange(marginals.num_depths), Purpose.DRAW)
    depths = [
        _Places.of(token_ids, log_probs, width, number)
        for token_ids, log_probs, number in zip(marginals.token_ids, marginals.log_probs, numbers, strict=True)
    ]
    shape = build_tree(root_token_id, _marginals_of_places(depths, width), budget, max_depth=max_depth)
    places = shape.tree
    rows = [depths[depth - 1] for depth in places.depths[1:]]
    chosen = places.token_ids[1:]
    token_ids = (root_token_id, *(row.token_ids[place] for row, place in zip(rows, chosen, strict=True)))
    draws = tuple(
        Draw(node, row.drawn_token_ids, row.drawn_log_probs)
        for node, (row, place) in enumerate(zip(rows, chosen, strict=True), start=1)
        if row.drawn_token_ids and place == len(row.token_ids) - 1
    )
    return BuiltTree(DraftTree(token_ids, places.parents, draws), shape.scores, shape.ranks, marginals.width)


class _Places(NamedTuple):
    """The places for children at one depth: their tokens and scores, and what the last one was drawn from, if it was."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    drawn_token_ids: tuple[int, ...]
    drawn_log_probs: tuple[float, ...]

    @classmethod
    def of(cls, token_ids: NDArray[np.int32], log_probs: NDArray[np.float32], width: int, number: np.float64) -> _Places:
        """The places of one row of marginals; `number` in (0, 1) picks the drawn token."""
        likely = np.lexsort((token_ids, -log_probs))
        likely = likely[log_probs[likely] > -np.inf]
        chosen, rest = likely[: width - 1], likely[width - 1 :][:MAX_DRAWN_TOKENS]
        chosen_ids, chosen_log_probs = tuple(token_ids[chosen].tolist()), tuple(log_probs[chosen].tolist())
        if not len(rest):
            return cls(chosen_ids, chosen_log_probs, (), ())
        draw = Draw(1, tuple(token_ids[rest].tolist()), tuple(log_probs[rest].tolist()))
        token_id = draw.token_ids[pick(draw.probabilities[np.newaxis], np.array([number]))[0]]
        mass = min(0.0, float(np.logaddexp.reduce(log_probs[rest].astype(np.float64))))
        return cls((*chosen_ids, token_id), (*chosen_log_probs, mass), draw.token_ids, draw.log_probs)


def _marginals_of_places(depths: Sequence[_Places], width: int) -> Marginals:
    """Marginals in which places stand for tokens, so that nothing drawn can decide the shape."""
    if not depths:
        return Marginals.empty()
    log_probs = np.full((len(depths), width), -np.inf, np.float32)
    for row, places in zip(log_probs, depths, strict=True):
        row[: len(places.log_probs)] = places.log_probs
    order = np.argsort(-log_probs, axis=1, kind="stable")
    return Marginals(order.astype(np.int32), np.take_along_axis(log_probs, order, 1))


def accept_hybrid(
    tree: DraftTree,
    posterior: Sequence[int],
    probabilities: Callable[[int], NDArray[np.float64]],
    *,
    seed: int,
    root_position: int,
) -> Acceptance:
    """Walk from the root: a drawn child Y is accepted with probability min(1, p(Y) / q(Y)), and after it was not, the token
    comes from the residual (p - q)+, renormalised; where no child was drawn, it is the posterior's.

    `posterior[i]` is the target's own sample after node i, independent of `uniforms`; `probabilities(i)` the target's
    processed distribution after node i, float64 [vocabulary], asked for on the way alone. A token that the tree contains is
    followed, another one is the bonus. Raises ValueError if the lengths differ.
    """
    if len(posterior) != len(tree):
        raise ValueError(f"tree has {len(tree)} nodes, the posterior {len(posterior)}")
    nodes = [0]
    while True:
        node = nodes[-1]
        draw, position = tree.drawn_children.get(node), root_position + len(nodes)
        token_id = posterior[node]
        if draw is not None:
            token_id = _token_after_draw(tree.token_ids[draw.node], draw, probabilities(node), seed, position)
        child = next((child for child in tree.children[node] if tree.token_ids[child] == token_id), None)
        if child is None:
            return Acceptance(tuple(nodes), token_id)
        nodes.append(child)


def _token_after_draw(drawn_token_id: int, draw: Draw, target: NDArray[np.float64], seed: int, position: int) -> int:
    drawn_from = np.zeros((1, len(target)))
    drawn_from[0, list(draw.token_ids)] = draw.probabilities
    positions = np.array([position], np.int64)
    chosen = choose_after_draw(
        np.array([drawn_token_id]),
        drawn_from,
        target[np.newaxis],
        uniforms(seed, positions, Purpose.ACCEPT),
        uniforms(seed, positions, Purpose.RESIDUAL),
    )
    return int(chosen[0])
