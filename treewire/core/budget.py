"""This file is the budget: how many nodes a round's tree is worth, from what they promise and what a step costs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treewire.core.build import BuiltTree

Probabilities = NDArray[np.float64]

_MEMORY_ROUNDS = 256.0  # what nodes did so many rounds ago counts 1/e
_PRIOR_ROUNDS = 2.0  # of perfect predictions, so that the first few rounds decide nothing


@dataclass(frozen=True)
class StepPrice:
    """A target step over `batch_size` trees of `num_nodes` nodes each, root included, takes `seconds`.

    Raises ValueError on a number that is not above 0.
    """

    num_nodes: int
    batch_size: int
    seconds: float

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.batch_size) < 1 or not 0.0 < self.seconds < math.inf:
            raise ValueError(
                f"a price has nodes, a batch and seconds above 0, not {self.num_nodes}, {self.batch_size}, {self.seconds}"
            )


class PriceTable:
    """Measured step prices, and what lies between them: straight lines over nodes, and over batch sizes between those.

    Nodes never make a step cheaper: where a larger tree was measured faster, something else held up the smaller one. Beyond the
    last measured point a line goes on, the steeper of the last one and that through all; below the first the first price holds.
    Raises ValueError without any price, or with two for the same step.
    """

    def __init__(self, prices: Iterable[StepPrice]) -> None:
        self.prices = tuple(sorted(prices, key=lambda price: (price.batch_size, price.num_nodes)))
        if not self.prices:
            raise ValueError("a price table has at least one price")
        if len({(price.num_nodes, price.batch_size) for price in self.prices}) < len(self.prices):
            raise ValueError("a price table has one price for each number of nodes and batch size")
        self._batch_sizes = sorted({price.batch_size for price in self.prices})

    def seconds(self, num_nodes: int, batch_size: int) -> float:
        """Seconds of a step over so many trees of so many nodes each."""
        return float(self.curve(num_nodes, batch_size)[-1])

    def curve(self, max_nodes: int, batch_size: int) -> NDArray[np.float64]:
        """Seconds for trees of 1, 2, ... `max_nodes` nodes at one batch size."""
        nodes = np.arange(1, max_nodes + 1, dtype=np.float64)
        above = bisect_right(self._batch_sizes, batch_size)
        if above == 0 or len(self._batch_sizes) == 1:
            return self._measured(self._batch_sizes[0], nodes)
        low, high = self._batch_sizes[min(above, len(self._batch_sizes) - 1) - 1 :][:2]
        lower, upper = self._measured(low, nodes), self._measured(high, nodes)
        curve: NDArray[np.float64] = lower + np.maximum(upper - lower, 0.0) * ((batch_size - low) / (high - low))
        return curve

    def _measured(self, batch_size: int, nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        points = [(price.num_nodes, price.seconds) for price in self.prices if price.batch_size == batch_size]
        known, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        between = np.interp(nodes, known, seconds)
        if len(points) == 1:
            return between
        slope = max((seconds[-1] - seconds[first]) / (known[-1] - known[first]) for first in (0, -2))
        beyond: NDArray[np.float64] = between + slope * np.maximum(nodes - known[-1], 0.0)
        return beyond


@dataclass(frozen=True)
class Overhead:
    """Seconds of a round beside the target's step: of every round, and of the draft that a round with a tree needs more."""

    round_seconds: float
    draft_seconds: float


def expected_tokens(path_probabilities: Probabilities, max_budget: int) -> Probabilities:
    """Tokens that the tree gives when cut at 0, 1, ... `max_budget` nodes: the bonus, and the sum of the nodes' probabilities.

    `path_probabilities`, [nodes], say how likely each node is to be accepted, in the tree's order without its root. Behind the
    tree's last node nothing is gained.
    """
    known = path_probabilities[:max_budget]
    tokens = np.ones(max_budget + 1)
    tokens[1 : len(known) + 1] += np.cumsum(known)
    tokens[len(known) + 1 :] = tokens[len(known)]
    return tokens


def choose_budget(tokens: Probabilities, seconds: Probabilities, tokens_per_second: float) -> int:
    """The number of nodes, root excluded, that is worth most: its tokens, less its seconds at the rate that rounds reach.

    Both are for budgets of 0, 1, ... nodes. The whole curve is searched, since a price may be steep first and flat later; 0 is
    plain decoding, so that no estimate makes a round worse than that. Of equals the smaller. Cut trees keep their spine, see
    `spine_length`.
    """
    return int(np.argmax(tokens - tokens_per_second * seconds))


def spine_length(built: BuiltTree) -> int:
    """How deep the chain of best tokens goes in a tree.

    Trees built best first from marginals have it down to their own depth, wherever they are cut: of all nodes of a depth the
    one with the best token at every depth comes first.
    """
    length, node = 0, 0
    while (best := next((child for child in built.tree.children[node] if built.ranks[child] == 0), None)) is not None:
        length, node = length + 1, best
    return length


@dataclass(frozen=True)
class _DepthRecord:
    """What a drafter promised of one kind of nodes and what came of it, both fading."""

    predicted: float = 0.0
    accepted: float = 0.0

    @property
    def factor(self) -> float:
        """Accepted over predicted, near 1 as long as little is known."""
        return (self.accepted + _PRIOR_ROUNDS) / (self.predicted + _PRIOR_ROUNDS)

    def update(self, predicted: float, accepted: bool) -> _DepthRecord:
        """The record one round later."""
        fading = math.exp(-1.0 / _MEMORY_ROUNDS)
        return _DepthRecord(self.predicted * fading + predicted, self.accepted * fading + accepted)


class _Kind(NamedTuple):
    """Nodes that are calibrated together: those of a depth on the chain of best tokens (the spine), or beside it."""

    depth: int
    on_spine: bool


@dataclass(frozen=True)
class Calibration:
    """How far a drafter's probabilities can be trusted, by depth, on the spine and beside it: a value for each drafter, fitted
    on line. A drafter that is too sure of its best tokens underrates the others, and the other way round.
    """

    records: Mapping[_Kind, _DepthRecord] = field(default_factory=dict)

    def update(self, depth: int, predicted: float, accepted: bool, *, on_spine: bool = True) -> Calibration:
        """After a round: a tree had nodes of this kind with `predicted` probability together; was one of them accepted?

        Raises ValueError on a depth below 1 or a probability outside 0 to 1, of which rounding may exceed 1 by little.
        """
        if depth < 1 or not 0.0 <= predicted <= 1.001:
            raise ValueError(f"depth {depth} has probability {predicted}; depths start at 1, probabilities end there")
        kind = _Kind(depth, on_spine)
        record = self.records.get(kind, _DepthRecord()).update(min(predicted, 1.0), accepted)
        return replace(self, records={**self.records, kind: record})

    def update_from(self, built: BuiltTree, accepted_nodes: Sequence[int]) -> Calibration:
        """After a round: a tree was verified and these nodes, root first, were accepted."""
        predicted: dict[_Kind, float] = {}
        kinds = _kinds(built)
        for kind, score in zip(kinds[1:], built.scores[1:], strict=True):
            predicted[kind] = predicted.get(kind, 0.0) + math.exp(score)
        accepted = {kinds[node] for node in accepted_nodes}
        records = dict(self.records)
        for kind, probability in predicted.items():
            records[kind] = records.get(kind, _DepthRecord()).update(min(probability, 1.0), kind in accepted)
        return replace(self, records=records)

    def factor(self, depth: int, *, on_spine: bool = True) -> float:
        """What the drafter's path probabilities are multiplied by at this depth; beyond what is known, the deepest known."""
        deepest = max((kind.depth for kind in self.records if kind.on_spine is on_spine), default=depth)
        return self.records.get(_Kind(min(depth, deepest), on_spine), _DepthRecord()).factor

    def path_probabilities(self, built: BuiltTree) -> Probabilities:
        """How likely each node is to be accepted, float64 [nodes without root]: never above 1 nor above its parent's."""
        return self.calibrated(claims_of(built))

    def calibrated(self, claims: Claims) -> Probabilities:
        """The same of a tree's claims."""
        factors = self._factors
        if len(claims.depths) and (deepest := int(claims.depths.max())) >= len(factors):
            factors = np.vstack([factors, np.repeat(factors[-1:], deepest + 1 - len(factors), axis=0)])
        likely = (claims.probabilities * factors[claims.depths, claims.beside_spine]).tolist()
        for node, parent in enumerate(claims.parents):
            bound = likely[parent] if parent >= 0 else 1.0
            if likely[node] > bound:
                likely[node] = bound
        return np.array(likely, np.float64)

    @cached_property
    def _factors(self) -> NDArray[np.float64]:
        """Factors by depth, and by whether nodes are beside the spine: [depths known, 2]."""
        deepest = max((kind.depth for kind in self.records), default=0)
        rows = [[self.factor(depth, on_spine=on_spine) for on_spine in (True, False)] for depth in range(deepest + 1)]
        return np.array(rows, np.float64)


class Claims(NamedTuple):
    """What a drafter says of a tree's nodes, the root left out: their path probabilities, and what these are calibrated by.

    `parents` are -1 for children of the root, `beside_spine` is 1 for nodes that are not on the spine.
    """

    probabilities: Probabilities
    depths: NDArray[np.int64]
    beside_spine: NDArray[np.int64]
    parents: Sequence[int]


def claims_of(built: BuiltTree) -> Claims:
    """The claims of a tree."""
    kinds = _kinds(built)[1:]
    return Claims(
        np.exp(built.scores[1:]),
        np.array([kind.depth for kind in kinds], np.int64),
        np.array([not kind.on_spine for kind in kinds], np.int64),
        [parent - 1 for parent in built.tree.parents[1:]],
    )


def _kinds(built: BuiltTree) -> list[_Kind]:
    """The kind of each node, the root's included."""
    on_spine = [True]
    for parent, rank in zip(built.tree.parents[1:], built.ranks[1:], strict=True):
        on_spine.append(on_spine[parent] and rank == 0)
    return list(map(_Kind, built.tree.depths, on_spine))
