"""Processes that the service starts end with it."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.system.test_processes import ROOT
from verify_service.parent_watch import end_with_parent

STARTER = """
from multiprocessing import get_context
from tests.verify.test_parent_watch import child

process = get_context("spawn").Process(target=child)
process.start()
process.join()
"""


def child() -> None:
    """What a rank and the compiler of structures do first."""
    end_with_parent()
    print("alive", flush=True)
    time.sleep(600)


def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    """The pipe that both write to is at its end only when both are gone."""
    with subprocess.Popen([sys.executable, "-c", STARTER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "alive\n"
        parent.kill()
        rest, _ = parent.communicate(timeout=60)
    assert rest == ""
