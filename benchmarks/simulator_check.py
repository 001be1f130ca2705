"""This file is the check of the simulator: what it predicts beside what a real stack measured, in one run.

python -m benchmarks.simulator_check [--recording FILE] [--json FILE]

A stack is recorded and its machine measured; then the same stack answers the same prompts at each concurrency, plainly and with
trees, and the simulator replays the recording at the same loads. The error is predicted over measured, less one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from treewire.bench import PROMPTS, Mode, Plan, Row, measure_cells
from treewire.simulation.policies import PolicyName
from treewire.simulation.recorder import record_stack
from treewire.simulation.recording import Recording, Rounds
from treewire.simulation.report import row_of
from treewire.simulation.simulator import Load, Simulation
from treewire.simulation.site import measured_site
from treewire.stack import Stack, StackOptions

RESULT = Path(__file__).parent / "results" / "simulator_check.json"
CONCURRENCIES = (1, 4, 16)
COMPARED = ("tokens_per_second", "seconds_per_token", "ttft_seconds", "mean_acceptance_length")


def cells(budget: int) -> list[tuple[Mode, int, int]]:
    """What is compared."""
    modes = ((Mode.PLAIN, 0), (Mode.TREE, budget))
    return [(mode, size, concurrency) for concurrency in CONCURRENCIES for mode, size in modes]


async def run(options: StackOptions, budget: int, num_prompts: int, max_tokens: int) -> tuple[Recording, list[Row]]:
    """The recording and the measured rows, from one stack."""
    measured: list[Row] = []
    plan = Plan(num_prompts=num_prompts, max_tokens=max_tokens)

    @asynccontextmanager
    async def started(each: StackOptions) -> AsyncIterator[Stack]:
        async with Stack(each) as stack:
            yield stack
            measured.extend(await measure_cells(stack.address, plan, cells(budget)))

    recording = await record_stack(options, PROMPTS[:num_prompts], max_tokens=max_tokens, started=started)
    return recording, measured


def comparison(recording: Recording, measured: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each measured one: measured, predicted, and the error of each figure."""
    site = measured_site(recording.machine)
    rounds = Rounds(recording, max(1, *(row.budget for row in measured)))
    compared = []
    for row in measured:
        policy = PolicyName(row.mode, row.budget)
        load = Load(row.concurrency, max(row.num_prompts, row.concurrency))
        predicted = row_of(site, policy, load, Simulation(site, rounds, policy, load).run())
        figures = {name: (getattr(row, name), getattr(predicted, name)) for name in COMPARED}
        compared.append(
            {
                "mode": row.mode,
                "concurrency": row.concurrency,
                "budget": row.budget,
                "measured": {name: seen for name, (seen, _) in figures.items()},
                "predicted": {name: said for name, (_, said) in figures.items()},
                "error": {name: said / seen - 1.0 if seen else 0.0 for name, (seen, said) in figures.items()},
            }
        )
    return compared


def table(compared: Sequence[dict[str, Any]]) -> Table:
    """For people: measured, predicted, error."""
    shown = Table("streams", "mode", *(name.replace("_", " ") for name in COMPARED), title="measured / predicted / error")
    for row in compared:
        cells_shown = [
            f"{row['measured'][name]:.3g} / {row['predicted'][name]:.3g} / {row['error'][name]:+.0%}" for name in COMPARED
        ]
        shown.add_row(str(row["concurrency"]), f"{row['mode']} {row['budget']}", *cells_shown)
    return shown


def main(arguments: Sequence[str]) -> int:
    """Record, measure, predict, compare."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator_check",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", default=StackOptions.target)
    parser.add_argument("--drafter", default=StackOptions.drafter)
    parser.add_argument("--dtype", default="int8", help="type of the target's weights")
    parser.add_argument("--budget", type=int, default=8, help="of the trees")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--recording", type=Path, help="keep the recording in this file")
    parser.add_argument("--json", type=Path, default=RESULT, help="file for the figures")
    options = parser.parse_args(arguments)
    stack = replace(StackOptions(target=options.target, drafter=options.drafter, dtype=options.dtype), port=0)
    recording, measured = asyncio.run(run(stack, options.budget, options.prompts, options.max_tokens))
    if options.recording is not None:
        recording.save(options.recording)
    compared = comparison(recording, measured)
    worst = max(abs(row["error"]["tokens_per_second"]) for row in compared)
    Console().print(table(compared))
    result = {**provenance(), "machine": recording.machine.to_json(), "largest_error_of_tokens_per_second": worst}
    options.json.write_text(json.dumps({**result, "rows": compared}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
