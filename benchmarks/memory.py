"""This file is the resident memory of a stack: each service before, and while many streams are open.

python -m benchmarks.memory [--target NAME] [--dtype int8] [--streams 256] [--tokens N] [--json FILE]

All streams have one prompt, whose prefix the target shares between them: what is measured is what sessions and services hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance, resident_megabytes
from treewire.bench import PROMPTS
from treewire.client import AsyncClient
from treewire.stack import Service, Stack, StackOptions

BOUNDS_MEGABYTES = {Service.VERIFY: 700, Service.DRAFT: 500, Service.GATEWAY: 200}
_SAMPLE_SECONDS = 0.1
_LONG_SECONDS = 3600.0


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """MB of each service: idle after its first answer, the most while all streams are open, and after they have ended."""
    stack_options = StackOptions(target=options.target, dtype=options.dtype, threads=options.threads, port=0)
    async with Stack(stack_options) as stack, AsyncClient(stack.address, timeout_seconds=_LONG_SECONDS) as client:
        await client.generate(PROMPTS[0], max_tokens=8)
        idle = _megabytes(stack)
        peak = dict(idle)
        streams = asyncio.gather(*(client.generate(PROMPTS[0], max_tokens=options.tokens) for _ in range(options.streams)))
        while not streams.done():
            peak = {service: max(peak[service], now) for service, now in _megabytes(stack).items()}
            await asyncio.wait([streams], timeout=_SAMPLE_SECONDS)
        await streams
        after = _megabytes(stack)
    return {
        service.value: {
            "idle_megabytes": round(idle[service], 1),
            "peak_megabytes": round(peak[service], 1),
            "after_megabytes": round(after[service], 1),
            "bound_megabytes": BOUNDS_MEGABYTES[service],
        }
        for service in idle
    }


def _megabytes(stack: Stack) -> dict[Service, float]:
    return {service: resident_megabytes(pid) for service, pid in stack.pids.items()}


def main(arguments: Sequence[str]) -> int:
    """Measure and show; 1 if a service was above its bound at any time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    services = asyncio.run(measure(options))
    table = Table("service", "idle, MB", "most, MB", "after, MB", "bound, MB", title=f"{options.streams} streams")
    for name, figures in services.items():
        table.add_row(name, *(str(value) for value in figures.values()))
    Console().print(table)
    if options.json is not None:
        kept = {name: getattr(options, name) for name in ("target", "dtype", "streams", "tokens")}
        options.json.write_text(json.dumps(provenance() | kept | {"services": services}, indent=2) + "\n")
    return int(any(figures["peak_megabytes"] > figures["bound_megabytes"] for figures in services.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
