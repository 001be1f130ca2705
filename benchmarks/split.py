"""This file is the price of the split: the same services and prompts as three processes, and as one without a wire.

python -m benchmarks.split [--target NAME] [--drafter NAME] [--dtype TYPE] [--concurrencies 1,4,16] [--json FILE]

Both stacks run side by side and are measured in turns, so that what else the machine does meets both alike; medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from treewire.bench import PROMPTS
from treewire.client import AsyncClient
from treewire.stack import Stack, StackOptions

SPLIT, CO_LOCATED = "split", "co-located"


async def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Tokens a second of both stacks, and their ratio, at each concurrency."""
    names = ("target", "drafter", "dtype", "threads")
    shared = StackOptions(port=0, **{name: getattr(options, name) for name in names})
    async with AsyncExitStack() as lifetime:
        clients = {}
        for system, stack_options in ((SPLIT, shared), (CO_LOCATED, replace(shared, co_located=True))):
            stack = await lifetime.enter_async_context(Stack(stack_options))
            clients[system] = await lifetime.enter_async_context(AsyncClient(stack.address))
            await _tokens_per_second(clients[system], 1, options.tokens)  # what is loaded lazily
        return [await _row(clients, concurrency, options) for concurrency in options.concurrencies]


async def _row(clients: dict[str, AsyncClient], concurrency: int, options: argparse.Namespace) -> dict[str, object]:
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(options.turns):
        for name, client in clients.items():
            rates[name].append(await _tokens_per_second(client, concurrency, options.tokens))
    middle = {name: median(values) for name, values in rates.items()}
    return {
        "concurrency": concurrency,
        "tokens_per_second": {name: round(rate, 1) for name, rate in middle.items()},
        "split / co-located": round(middle[SPLIT] / middle[CO_LOCATED], 3),
    }


async def _tokens_per_second(client: AsyncClient, concurrency: int, num_tokens: int) -> float:
    """Of so many generations at once."""
    started = time.perf_counter()
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(concurrency)]
    answers = await asyncio.gather(*(client.generate(each, max_tokens=num_tokens, ignore_end=True) for each in prompts))
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - started)


def main(arguments: Sequence[str]) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--concurrencies", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    rows = asyncio.run(measure(options))
    table = Table("streams", f"{SPLIT}, tokens/s", f"{CO_LOCATED}, tokens/s", "split / co-located", title=options.target)
    for row in rows:
        rates = row["tokens_per_second"]
        assert isinstance(rates, dict)
        table.add_row(str(row["concurrency"]), str(rates[SPLIT]), str(rates[CO_LOCATED]), str(row["split / co-located"]))
    Console().print(table)
    if options.json is not None:
        kept = {name: getattr(options, name) for name in ("target", "drafter", "dtype", "tokens", "turns")}
        options.json.write_text(json.dumps(provenance() | kept | {"rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
