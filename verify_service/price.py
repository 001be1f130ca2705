"""This file is the price of a step: measured over nodes and sessions at start-up, kept, and refreshed while serving."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from treewire.core.acceptance import Acceptance
from treewire.core.budget import PriceTable, StepPrice
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.kv.pages import KvExhausted
from verify_service.engine import PrefillChunk, Scoring, SessionId, TargetEngine

NUM_NODES = (1, 2, 4, 8, 16, 32, 64, 128)
BATCH_SIZES = (1, 2, 4, 8, 16)
_CORNERS = frozenset({(1, 1), (8, 1), (32, 1), (1, 8), (8, 8)})
_CONTEXT_TOKENS = 128
_NUM_REPEATS = 3
_SMALLEST_SECONDS = 1e-6  # of a step that the clock does not see

_COMMON_WEIGHT = 0.1  # of the newest step, for all prices together
_OWN_WEIGHT = 0.02  # and for the price of its own size beside that
_FARTHEST_SURPRISE = 4.0  # a step that took more times what was expected was held up by something else

_HASH_CHARACTERS = 16
_FORMAT = 1

Report = Callable[[StepPrice], None]
Measure = Callable[[TargetEngine], Sequence[StepPrice]]


def no_prices(engine: TargetEngine) -> Sequence[StepPrice]:
    """Measures nothing."""
    return ()


@dataclass(frozen=True)
class PriceMeasurement:
    """Times steps of the engine over nodes x sessions, the corners of the table first, until `limit_seconds` are spent.

    The fastest of a few repeats counts: what holds up a step here and there is not its price. What no time or room is left
    for stays with the lines through what was measured. Every session that it opens is released. `report` is called for each
    price.
    """

    clock: Callable[[], float]
    report: Report
    limit_seconds: float = 8.0
    max_batch_size: int = max(BATCH_SIZES)

    def __call__(self, engine: TargetEngine) -> Sequence[StepPrice]:
        deadline = self.clock() + self.limit_seconds
        opened: list[SessionId] = []
        prices = []
        try:
            for num_nodes, batch_size in self._steps(engine.target.max_tree_nodes):
                if self.clock() > deadline:
                    break
                try:
                    _open_until(engine, opened, batch_size)
                    prices.append(self._price(engine, opened[:batch_size], num_nodes))
                except KvExhausted:
                    continue
                self.report(prices[-1])
        finally:
            for session in opened:
                engine.release(session)
        return prices

    def _steps(self, max_tree_nodes: int) -> Iterator[tuple[int, int]]:
        """Nodes and batch sizes: first those that give the curve its shape, then by how much there is to compute."""
        sizes = [size for size in BATCH_SIZES if size <= self.max_batch_size]
        steps = [(num_nodes, size) for num_nodes in NUM_NODES if num_nodes <= max_tree_nodes for size in sizes]
        yield from sorted(steps, key=lambda step: (step not in _CORNERS, step[0] * step[1], step[1]))

    def _price(self, engine: TargetEngine, sessions: Sequence[SessionId], num_nodes: int) -> StepPrice:
        tree = DraftTree(
            tuple(node % engine.target.vocabulary_size for node in range(num_nodes)),
            (-1, *((node - 1) // 2 for node in range(1, num_nodes))),
        )
        taken = []
        for _ in range(_NUM_REPEATS):
            started = self.clock()
            engine.step([Scoring(session, tree) for session in sessions])
            taken.append(self.clock() - started)
            for session in sessions:
                engine.keep(session, Acceptance((0,), 0))
        return StepPrice(num_nodes, len(sessions), max(min(taken), _SMALLEST_SECONDS))


def _open_until(engine: TargetEngine, opened: list[SessionId], count: int) -> None:
    """Have that many sessions of a common context length, as far as there is room.

    Their ids are below 0, those of callers start at 1. Each prompt begins with another of the vocabulary's last tokens: it
    shares no prefix with the others, nor with any caller's.
    """
    target = engine.target
    length = max(1, min(_CONTEXT_TOKENS, target.max_context // 2))
    while len(opened) < count:
        session = -1 - len(opened)
        prompt = (session % target.vocabulary_size,) * length
        num_known = engine.open(session, prompt, Sampling())
        opened.append(session)
        engine.step([PrefillChunk(session, prompt[num_known:], last=True)])


@dataclass(frozen=True)
class CachedMeasurement:
    """Prices from a file if they were measured for the same `subject` before; measured, and written there, otherwise.

    `subject` says all that prices depend on: model, type, threads, machine.
    """

    measure: Measure
    directory: Path
    subject: str

    def __call__(self, engine: TargetEngine) -> Sequence[StepPrice]:
        if (prices := self._read()) is None:
            prices = self.measure(engine)
            self._write(prices)
        return prices

    @property
    def path(self) -> Path:
        """Where the prices of the subject are."""
        name = hashlib.sha256(f"{_FORMAT}|{self.subject}".encode()).hexdigest()[:_HASH_CHARACTERS]
        return self.directory / f"{name}.json"

    def _read(self) -> Sequence[StepPrice] | None:
        """None if there is no file, or one that this version did not write."""
        try:
            rows = json.loads(self.path.read_text())["prices"]
            return PriceTable(StepPrice(**row) for row in rows).prices
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write(self, prices: Sequence[StepPrice]) -> None:
        """Appears whole or not at all; a directory that cannot be written only costs the next start its time."""
        content = {"subject": self.subject, "prices": [asdict(price) for price in prices]}
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        with suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(content, indent=2) + "\n")
            partial.replace(self.path)


class LivePrices:
    """Prices that follow what steps really take, as exponentially weighted means; none if nothing was measured.

    A step is compared with what was expected of it. All prices move by some of that, since what makes a machine slow or fast
    does so for steps of every size: sizes that are never tried would otherwise keep the prices of a bad hour, and for these
    prices never be tried. The price of the nearest size moves by a little more.
    """

    def __init__(self, measured: Sequence[StepPrice]) -> None:
        self._seconds = {(price.num_nodes, price.batch_size): price.seconds for price in measured}

    @property
    def prices(self) -> tuple[StepPrice, ...]:
        """The prices as they are now."""
        return tuple(StepPrice(*step, seconds) for step, seconds in self._seconds.items())

    def observe(self, num_nodes: Sequence[int], seconds: float) -> None:
        """A step over trees of so many nodes took so long."""
        if not self._seconds or not num_nodes or seconds <= 0.0:
            return
        mean_nodes, batch_size = sum(num_nodes) / len(num_nodes), len(num_nodes)
        expected = PriceTable(self.prices).seconds(round(mean_nodes), batch_size)
        surprise = min(seconds / expected, _FARTHEST_SURPRISE)
        nearest = min(self._seconds, key=lambda step: (_distance(step[1], batch_size), _distance(step[0], mean_nodes)))
        for step in self._seconds:
            self._seconds[step] *= 1.0 + (_COMMON_WEIGHT + _OWN_WEIGHT * (step == nearest)) * (surprise - 1.0)


def _distance(one: float, other: float) -> float:
    """How far apart two counts are, as a ratio of at least 1."""
    return max(one / other, other / one)
