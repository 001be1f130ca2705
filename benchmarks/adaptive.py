"""This file is the adaptive budget beside fixed ones and plain decoding, through one running stack.

python -m benchmarks.adaptive [--target NAME] [--drafter NAME] [--dtype int8] [--concurrencies 1,2,4,8,16] [--budgets 2,4,8,16]
    [--tokens N] [--turns N] [--json FILE]

All modes are measured in turns at each concurrency, so that what else the machine does meets them alike; medians count. What
the gateway learns in the first answers of a concurrency is part of the first turn, as it is in service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from treewire.bench import PROMPTS
from treewire.client import AsyncClient
from treewire.stack import Stack, StackOptions

PLAIN, AUTO = "plain", "auto"


class Measured:
    """What one mode gave at one concurrency."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.nodes: Counter[int] = Counter()

    @property
    def rate(self) -> float:
        """Tokens a second, the median of the turns."""
        return median(self.rates)

    @property
    def mean_nodes(self) -> float:
        """Nodes of a round's tree."""
        return sum(nodes * rounds for nodes, rounds in self.nodes.items()) / max(1, self.nodes.total())


async def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """The row of each concurrency."""
    names = ("target", "drafter", "dtype", "threads")
    stack_options = StackOptions(port=0, **{name: getattr(options, name) for name in names})
    async with Stack(stack_options) as stack, AsyncClient(stack.address) as client:
        await client.generate(PROMPTS[0], max_tokens=16)  # what is loaded lazily
        return [await _row(client, concurrency, options) for concurrency in options.concurrencies]


async def _row(client: AsyncClient, concurrency: int, options: argparse.Namespace) -> dict[str, object]:
    budgets: dict[str, int | None] = {PLAIN: 0, **{f"fixed {budget}": budget for budget in options.budgets}, AUTO: None}
    modes = {name: Measured() for name in budgets}
    for turn in range(options.turns):
        for name, budget in budgets.items():
            await _generate(client, modes[name], concurrency, budget, options.tokens, offset=turn * concurrency)
    best = max(measured.rate for name, measured in modes.items() if name != AUTO)
    return {
        "concurrency": concurrency,
        "tokens_per_second": {name: round(measured.rate, 1) for name, measured in modes.items()},
        "mean_nodes": round(modes[AUTO].mean_nodes, 2),
        "auto / best fixed": round(modes[AUTO].rate / best, 3),
        "auto / plain": round(modes[AUTO].rate / modes[PLAIN].rate, 3),
    }


async def _generate(
    client: AsyncClient, measured: Measured, concurrency: int, budget: int | None, num_tokens: int, *, offset: int
) -> None:
    prompts = [PROMPTS[(offset + number) % len(PROMPTS)] for number in range(concurrency)]
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(client.generate(prompt, max_tokens=num_tokens, ignore_end=True, budget=budget) for prompt in prompts)
    )
    measured.rates.append(sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started))
    for answer in answers:
        measured.nodes.update(dict(enumerate(answer.statistics.rounds_by_nodes)))


def main(arguments: Sequence[str]) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--concurrencies", type=_numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--budgets", type=_numbers, default=[2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    rows = asyncio.run(measure(options))
    table = Table("streams", *_cells(rows[0]), title=f"{options.target}, tokens/s")
    for row in rows:
        table.add_row(str(row["concurrency"]), *_cells(row).values())
    Console().print(table)
    if options.json is not None:
        kept = {name: getattr(options, name) for name in ("target", "drafter", "dtype", "tokens", "turns")}
        options.json.write_text(json.dumps(provenance() | kept | {"rows": rows}, indent=2) + "\n")
    return 0


def _cells(row: dict[str, object]) -> dict[str, str]:
    """A row's figures by their names, but for the number of streams."""
    rates = row["tokens_per_second"]
    assert isinstance(rates, dict)
    others = {name: value for name, value in row.items() if name not in ("concurrency", "tokens_per_second")}
    return {name: str(value) for name, value in (rates | others).items()}


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
