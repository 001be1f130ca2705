"""Where skips are forbidden nothing goes by unseen: a test that would skip fails, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
import pytest

def test_that_skips():
    pytest.skip("no such machine")

@pytest.mark.skipif(True, reason="not today")
def test_that_is_skipped():
    pass

@pytest.fixture
def cable():
    pytest.skip("no cable")

def test_whose_fixture_skips(cable):
    pass

@pytest.mark.xfail(reason="known", strict=True)
def test_that_fails_as_expected():
    assert False

def test_that_passes():
    pass
"""


def _pytest(folder: Path, no_skips: str) -> subprocess.CompletedProcess[str]:
    """A run of a folder with the hooks of all tests."""
    options = [
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-rf",
        "--continue-on-collection-errors",
        "--rootdir",
        str(folder),
    ]
    environment = {**os.environ, "TREEWIRE_NO_SKIPS": no_skips}
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_skips_fail_with_their_reason_where_they_are_forbidden(tmp_path: Path) -> None:
    """In a test, by a mark, in a fixture, of a whole module; what fails as expected and what passes is as ever."""
    (tmp_path / "test_some.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text('import pytest\n\npytest.importorskip("no_such_module")\n')
    allowed, forbidden = _pytest(tmp_path, "0"), _pytest(tmp_path, "1")
    assert allowed.returncode == pytest.ExitCode.OK, allowed.stdout
    assert "1 passed, 4 skipped, 1 xfailed" in allowed.stdout
    assert forbidden.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed, 1 xfailed, 3 errors" in forbidden.stdout
    for reason in ("no such machine", "not today", "no cable", "could not import 'no_such_module'"):
        (line,) = [
            line for line in forbidden.stdout.splitlines() if line.startswith("TREEWIRE_NO_SKIPS is 1") and reason in line
        ]
        assert f"this skipped: {tmp_path}" in line


def test_continuous_integration_forbids_skips() -> None:
    """In both of its stages."""
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands.index("export TREEWIRE_NO_SKIPS=1") < min(commands.index("make test"), commands.index("make test-sglang"))
