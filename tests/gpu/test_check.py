"""What `make gpu-check` runs on a GPU runs here on a CPU, with small shapes and without graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_check_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every check holds, every step is timed, and the report has its sections."""
    output = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu", "--output", str(output)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(output.read_text())
    assert len(report["checks"]) == 3 + 32 + 1
    assert [reason.split(",")[0] for reason in report["left_out"]] == ["attention is triton", "attention is flashinfer"]
    assert report["failures"] == []
    assert {step["step"] for step in report["step_times"]} == {"plain", "chain 15", "tree 16", "tree 64"}
    assert {step["batch"] for step in report["step_times"]} == {1, 8}
    assert set(report["host_milliseconds"]) == {"write inputs", "launch", "wait and copy back"}
    assert set(report["round_milliseconds"]) == {"co-located", "split", "split / co-located"}
    assert {"decode", "queue", "walk", "encode"} <= set(report["service_milliseconds"])
    assert all(f"tree {budget} / chain 15" in ratios for ratios in report["ratios"] for budget in (16, 64))
