"""What may import what, and that what is generated is current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_import_contracts_hold() -> None:
    """The contracts in pyproject.toml: imports go down only."""
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "statement",
    ["import treewire", "import gateway.__main__", "import treewire.core.build", "import draft_service.engines.ngram"],
)
def test_needs_no_torch(statement: str) -> None:
    """The SDK, the whole gateway, the core and the n-gram drafter run where torch and transformers are not installed."""
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'], None)); "
    result = subprocess.run([sys.executable, "-c", block + statement], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_simulated_engines_never_import_torch() -> None:
    """A stack of simulated engines needs no torch."""
    statement = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'], None)); "
        "from verify_service.__main__ import prepare; from verify_service.settings import VerifySettings; "
        "from draft_service import __main__ as draft; from draft_service.settings import DraftSettings; "
        "prepare(VerifySettings(engine='simulated')).load(); draft.build_engine(DraftSettings(engine='simulated'))"
    )
    result = subprocess.run([sys.executable, "-c", statement], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_generated_code_is_current(tmp_path: Path) -> None:
    """`make proto` with the pinned generator gives exactly what is committed."""
    subprocess.run(["make", "--silent", "proto", f"PROTO_OUT={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "treewire/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "treewire/v1").glob("*_pb2*")}
    assert made == committed


def test_protos_are_clean() -> None:
    """buf's STANDARD rules and a comment on everything."""
    buf = Path(sys.executable).with_name("buf")
    result = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "tests/README.md"])
def test_documents_name_tests_that_exist(document: str) -> None:
    """Every invariant and every bug report from the field names its test, and the test is there."""
    text = (ROOT / document).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) >= 8
    for path, function in named:
        assert (ROOT / path).is_file(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), f"{path}::{function}"


def test_readme_and_makefile_agree() -> None:
    """Every `make` target that the README names exists, and every flag of `treewire up` it names is in --help."""
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z][a-z-]+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    shown = subprocess.run(
        [sys.executable, "-m", "treewire", "up", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200"},
    ).stdout
    for flag in set(re.findall(r"treewire up[^\n`]*?(--[a-z-]+)", readme)):
        assert flag in shown, flag
