"""What all tests share: logs that go where a process sends them, threads that do not starve their neighbours, and property
tests with the same examples every time and no deadline on a busy machine."""

import logging
import os
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch comes in: spinning threads starve a shared machine

from treewire.runtime.logging import configure_logging

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("deterministic")


@pytest.fixture(autouse=True)
def _configured_logging() -> Iterator[None]:
    before = logging.root.handlers[:], logging.root.level
    configure_logging(log_format="json", stream=sys.stderr)
    yield
    logging.root.handlers[:], logging.root.level = before
    structlog.reset_defaults()
