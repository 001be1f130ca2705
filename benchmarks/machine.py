"""This file is where and of what a figure was measured: machine, commit, date, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path


def provenance() -> dict[str, object]:
    """What a result needs beside its figures to mean anything."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": "python -m " + " ".join([_module(), *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def resident_megabytes(pid: int, field: str = "VmRSS") -> float:
    """Resident memory of a process, in MB of 10^6 bytes: now, or with VmHWM at its peak. Linux alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"process {pid} tells no {field}")


def _module() -> str:
    root = Path(__file__).resolve().parents[1]
    return ".".join(Path(sys.argv[0]).resolve().relative_to(root).with_suffix("").parts)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
