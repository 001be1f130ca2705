"""What all tests share: logs that go where a process sends them, threads that do not starve their neighbours, property tests
with the same examples every time and no deadline on a busy machine, and the order in which several processes take the files.
Where TREEWIRE_NO_SKIPS is 1, as in .ci/run, a test that skips has failed."""

import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import structlog
from hypothesis import settings

# Before torch comes in: spinning threads starve a shared machine, and each of several processes would take every core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else str(os.cpu_count() or 1))

from treewire.runtime.logging import configure_logging

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("deterministic")


_NO_SKIPS = "TREEWIRE_NO_SKIPS"
_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skipped, where none may."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skipped, where none may."""
    return _judged((yield))


def _judged(report: _Report) -> _Report:
    """The report; a failure that says why if it is a skip and skips are forbidden. What fails as expected is no skip."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(_NO_SKIPS) == "1":
        report.longrepr = f"{_NO_SKIPS} is 1, and this skipped: {_reason(report.longrepr)}"
        report.outcome = "failed"
    return report


def _reason(told: object) -> str:
    """What a skip says: its place, its line, and why."""
    return f"{told[0]}:{told[1]}: {told[2]}" if isinstance(told, tuple) else str(told)


@pytest.fixture(autouse=True)
def _configured_logging() -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    configure_logging(log_format="json", stream=sys.stderr)
    yield
    logging.root.handlers[:], logging.root.level = before
    structlog.reset_defaults()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the files, those whose tests are given most time come first, then those of many tests: none
    of them is left for the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    _name_apart(items)
    patience: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        for marker in item.iter_markers("timeout"):
            patience[item.path] = max(patience[item.path], *marker.args)
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-patience[item.path], -num_tests[item.path]))


def _name_apart(items: list[pytest.Item]) -> None:
    """Number tests of one name, as schemathesis makes them: pytest-xdist would run one of them and leave the others out."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid
        seen[name] += 1
        if seen[name] > 1:
            item._nodeid = f"{name}[{seen[name]}]"
