"""The page of benchmarks says what the results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import page


def test_the_page_is_current() -> None:
    """Written anew from the results it is the same; if this fails, `make docs-benchmarks` and commit."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page()


def test_every_row_and_every_reason_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that was not measured is named with its reason, the others with their rates and what they are to transformers'."""
    row = {"concurrency": 1, "budget": 0, "mean_acceptance_length": 1.0, "ttft_seconds": 0.25}
    rows = [
        {**row, "system": "transformers", "mode": "plain", "tokens_per_second": 8.0},
        {**row, "system": "treewire", "mode": "tree", "tokens_per_second": 20.0},
    ]
    missing = [{"system": "llama.cpp", "reason": "no compiler"}]
    content = {"command": "x", "cpu": "a processor", "rows": rows, "not_measured": missing}
    (tmp_path / "peers.json").write_text(json.dumps(content))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    written = page.page()
    assert "| treewire | tree | 1 | 0 | 20.0 | 2.50x | 1.00 | 250 ms |" in written
    assert "not measured: llama.cpp: no compiler" in written
    assert "Not measured yet: `make load`" in written
