"""This file is seeded equality on the real model: 20 prompts whose tokens must not depend on trees or on company.

    python -m benchmarks.seeded [--drafter auto] [--max-tokens 24] [--json benchmarks/results/seeded.json]

At T = 0.5 and 1.0 every prompt is answered by plain sampling, then with the same seed as a chain of 8 and with trees of 8 and
64 nodes, alone and among eight at once. Exits with 1 if any token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import provenance
from treewire.bench import PROMPTS
from treewire.client import AsyncClient
from treewire.stack import Stack, StackOptions
from treewire.types import Generation, Sampling

TEMPERATURES = (0.5, 1.0)
COMPANIES = (1, 8)
NUM_PROMPTS = 20


class Shape(NamedTuple):
    """A kind of tree; a `width` of 0 leaves it to the gateway."""

    name: str
    budget: int
    width: int


SHAPES = (Shape("chain of 8", 8, 1), Shape("8 nodes", 8, 0), Shape("64 nodes", 64, 0))


@dataclass(frozen=True)
class Row:
    """All prompts at one temperature with one shape, `at_once` of them at a time. `acceptance_length` is in tokens a round."""

    temperature: float
    shape: str
    at_once: int
    num_equal: int
    num_prompts: int
    num_tokens: int
    acceptance_length: float


async def generated(
    client: AsyncClient, said: Sequence[str], temperature: float, shape: Shape, at_once: int, max_tokens: int
) -> list[Generation]:
    """An answer to each prompt, each with a seed of its own."""
    free = asyncio.Semaphore(at_once)

    async def ask(number: int) -> Generation:
        async with free:
            return await client.generate(
                said[number],
                sampling=Sampling(temperature=temperature, seed=1000 + number),
                max_tokens=max_tokens,
                budget=shape.budget,
                width=shape.width or None,
                ignore_end=True,
            )

    return list(await asyncio.gather(*map(ask, range(len(said)))))


def compared(plain: Sequence[Generation], drafted: Sequence[Generation], temperature: float, shape: Shape, at_once: int) -> Row:
    """How many of them are equal, token for token."""
    num_tokens = sum(each.output_tokens - 1 for each in drafted)
    num_rounds = sum(each.statistics.rounds for each in drafted)
    equal = sum(one.token_ids == other.token_ids for one, other in zip(plain, drafted, strict=True))
    return Row(temperature, shape.name, at_once, equal, len(plain), num_tokens, round(num_tokens / num_rounds, 3))


async def main(arguments: argparse.Namespace) -> int:
    """Compare on a stack of its own; the exit code."""
    options = StackOptions(drafter=arguments.drafter, dtype="float32", port=0)
    said = PROMPTS[: arguments.num_prompts]
    rows: list[Row] = []
    async with Stack(options) as stack, AsyncClient(stack.address) as client:
        for temperature in TEMPERATURES:
            plain = await generated(client, said, temperature, Shape("plain", 0, 0), 1, arguments.max_tokens)
            for shape in SHAPES:
                for at_once in COMPANIES:
                    drafted = await generated(client, said, temperature, shape, at_once, arguments.max_tokens)
                    rows.append(compared(plain, drafted, temperature, shape, at_once))
                    print(rows[-1], flush=True)
    if arguments.json is not None:
        result = {**provenance(), "dtype": "float32", "drafter": options.chosen_drafter, "max_tokens": arguments.max_tokens}
        arguments.json.write_text(f"{json.dumps({**result, 'rows': [asdict(row) for row in rows]}, indent=2)}\n")
    return 0 if all(row.num_equal == row.num_prompts for row in rows) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="auto", help="drafter of the stack [default: %(default)s]")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens of each answer [default: %(default)s]")
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS, help="prompts [default: %(default)s]")
    parser.add_argument("--json", type=Path, help="file for the figures")
    sys.exit(asyncio.run(main(parser.parse_args())))
