"""Steps are priced at start-up, once for a model and machine, and prices follow what steps take while serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from treewire.core.budget import PriceTable, StepPrice
from treewire.core.sampling import Sampling
from treewire.core.simulated import SimulatedModel
from treewire.core.tree import DraftTree
from verify_service.engine import Posterior, PrefillChunk, Scoring, TargetEngine
from verify_service.engines.simulated import SimulatedTarget
from verify_service.price import CachedMeasurement, LivePrices, PriceMeasurement
from verify_service.service import limits
from verify_service.step import Step, Work

STEP_SECONDS, NODE_SECONDS = 0.030, 0.002


class TimedTarget(SimulatedTarget):
    """A simulated target on a clock of its own: a step takes a fixed time and some more for each node."""

    def __init__(self, max_tree_nodes: int = 40, kv_tokens: int = 1 << 16, speed: float = 1.0) -> None:
        super().__init__(SimulatedModel(), max_tree_nodes=max_tree_nodes, kv_tokens=kv_tokens)
        self.now = 0.0
        self.speed = speed

    def clock(self) -> float:
        """Seconds that steps have taken."""
        return self.now

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """Take time, then answer."""
        num_nodes = sum(len(item.tree) for item in work if isinstance(item, Scoring))
        self.now += (STEP_SECONDS + NODE_SECONDS * num_nodes) / self.speed
        return super().step(work)


def measured(target: TimedTarget, limit_seconds: float = 60.0, max_batch_size: int = 4) -> Sequence[StepPrice]:
    """The prices of a target."""
    reported: list[StepPrice] = []
    prices = PriceMeasurement(target.clock, reported.append, limit_seconds, max_batch_size)(target)
    assert list(prices) == reported
    return prices


def by_step(prices: Sequence[StepPrice]) -> dict[tuple[int, int], float]:
    """Seconds by nodes and batch size."""
    return {(price.num_nodes, price.batch_size): price.seconds for price in prices}


def test_prices_are_what_steps_take() -> None:
    """Every combination that the target takes has its price, and nothing stays open."""
    target = TimedTarget()
    prices = measured(target)
    assert {(price.num_nodes, price.batch_size) for price in prices} == {
        (nodes, size) for nodes in (1, 2, 4, 8, 16, 32) for size in (1, 2, 4)
    }
    for price in prices:
        assert price.seconds == pytest.approx(STEP_SECONDS + NODE_SECONDS * price.num_nodes * price.batch_size)
    assert (target.num_sessions, target.num_free_slots) == (0, 1 << 16)


def test_measuring_ends_when_its_time_is_spent() -> None:
    """The cheapest steps come first; those for which no time is left are not measured."""
    target = TimedTarget()
    prices = measured(target, limit_seconds=1.0)
    assert 1 <= len(prices) < 18
    assert target.now < 1.6
    assert (1, 1) in {(price.num_nodes, price.batch_size) for price in prices}


def test_a_small_memory_is_measured_as_far_as_it_goes() -> None:
    """Batches for whose sessions there is no room are left out."""
    prices = measured(TimedTarget(max_tree_nodes=8, kv_tokens=300))
    assert {price.batch_size for price in prices} == {1, 2}


def test_the_next_start_measures_nothing(tmp_path: Path) -> None:
    """Prices are read back for the same subject; another subject, or a damaged file, is measured."""
    calls: list[TargetEngine] = []

    def measure(engine: TargetEngine) -> Sequence[StepPrice]:
        calls.append(engine)
        return (StepPrice(1, 1, 0.03 * len(calls)), StepPrice(8, 1, 0.05))

    target = TimedTarget()
    first = CachedMeasurement(measure, tmp_path / "prices", "int8 on one core")
    assert tuple(first(target)) == tuple(first(target))
    assert len(calls) == 1
    CachedMeasurement(measure, tmp_path / "prices", "int8 on two cores")(target)
    assert len(calls) == 2
    for damage in ("{", '{"prices": []}', '{"prices": [{"num_nodes": 1}]}', "[]"):
        first.path.write_text(damage)
        first(target)
        assert first(target) == PriceTable(first(target)).prices
    assert len(calls) == 6


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A file where the directory should be only means that the next start measures again."""
    (tmp_path / "prices").write_text("")
    assert CachedMeasurement(measured, tmp_path / "prices", "")(TimedTarget())  # type: ignore[arg-type]


def test_prices_follow_a_machine() -> None:
    """A machine that turns three times slower is known to be so after some steps, also for sizes that were not seen."""
    prices = LivePrices(measured(TimedTarget()))
    for _ in range(80):
        prices.observe([8, 8], 3 * (STEP_SECONDS + NODE_SECONDS * 16))
        prices.observe([3], 3 * (STEP_SECONDS + NODE_SECONDS * 3))
    now = by_step(prices.prices)
    assert now[8, 2] == pytest.approx(3 * (STEP_SECONDS + NODE_SECONDS * 16), rel=0.1)
    assert PriceTable(prices.prices).seconds(3, 1) == pytest.approx(3 * (STEP_SECONDS + NODE_SECONDS * 3), rel=0.1)
    assert now[32, 4] == pytest.approx(3 * (STEP_SECONDS + NODE_SECONDS * 128), rel=0.25)


def test_prices_follow_a_size() -> None:
    """If only large trees turn dearer, their price alone does, as long as others are seen beside them."""
    prices = LivePrices((StepPrice(1, 1, 0.03), StepPrice(32, 1, 0.1)))
    for _ in range(600):
        prices.observe([1], 0.03)
        prices.observe([32], 0.2)
    assert by_step(prices.prices) == pytest.approx({(1, 1): 0.03, (32, 1): 0.2}, rel=0.1)


def test_one_long_step_changes_little() -> None:
    """A step that something else held up for a minute is one surprise of bounded weight."""
    prices = LivePrices((StepPrice(1, 1, 0.03),))
    prices.observe([1], 60.0)
    assert prices.prices[0].seconds < 0.045


def test_without_prices_nothing_is_observed() -> None:
    """A service that does not measure publishes none, however many steps it takes."""
    prices = LivePrices(())
    prices.observe([1], 0.03)
    assert prices.prices == ()


def test_a_step_prices_itself_and_publishes_it() -> None:
    """Prices are there once the engine is loaded, follow the trees that are scored, and are in what a session is granted."""
    target = TimedTarget()
    step = Step(lambda: target, measure=PriceMeasurement(target.clock, lambda price: None, 60.0, 2), clock=target.clock)
    assert step.prices == ()
    step.load()
    before = by_step(step.prices)
    target.speed = 0.5
    target.open(1, (300, 301), Sampling())
    step([Work(PrefillChunk(1, (300, 301), last=True))])
    assert by_step(step.prices) == before
    step([Work(Scoring(1, DraftTree.lone_root(300)))])
    after = by_step(step.prices)
    assert after[1, 1] == pytest.approx(before[1, 1] * 1.12)
    assert after[8, 2] == pytest.approx(before[8, 2] * 1.1)
    published = limits(target.target, step.prices).prices
    assert by_step([StepPrice(price.num_nodes, price.batch_size, price.seconds) for price in published]) == after


def test_an_engine_can_be_loaded_twice() -> None:
    """A service that starts over an engine which another one has warmed up finds its own traces and still starts."""
    target = TimedTarget()
    for _ in range(2):
        step = Step(lambda: target, measure=PriceMeasurement(target.clock, lambda price: None, 60.0, 2), clock=target.clock)
        step.load()
        assert len(step.prices) == 12
    assert target.num_sessions == 0
