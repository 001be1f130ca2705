"""This file is structured output on the real model: 50 prompts that must be answered in JSON of one schema, at T = 0 and 1.

    python -m benchmarks.structures [--drafter auto] [--budget 16] [--json benchmarks/results/structures.json]

Every answer is checked against the schema. The same prompts without a schema, as long, say what the structure costs or gains
in tokens a round. Exits with 1 if an answer is no such JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs

from benchmarks.machine import provenance
from treewire.client import AsyncClient
from treewire.stack import Stack, StackOptions
from treewire.types import Generation, Sampling

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 24},
        "kind": {"enum": ["plant", "animal", "place", "thing", "idea"]},
        "facts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "topic": {"enum": ["size", "colour", "origin", "use"]},
                    "text": {"type": "string", "minLength": 1, "maxLength": 32},
                },
                "required": ["topic", "text"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 3,
        },
        "rating": {
            "type": "object",
            "properties": {
                "stars": {"type": "integer", "minimum": 1, "maximum": 5},
                "certain": {"type": "boolean"},
                "tags": {"type": "array", "items": {"enum": ["old", "new", "rare", "common"]}, "maxItems": 2},
            },
            "required": ["stars", "certain", "tags"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "facts", "rating"],
    "additionalProperties": False,
}
SUBJECTS = (
    "an oak tree|a bicycle|the city of Rome|a honey bee|democracy|a teapot|the moon|a violin|a polar bear|gravity|a cactus|"
    "the Nile|chess|a lighthouse|a tomato|an umbrella|the number zero|a sailing ship|a kangaroo|ice cream|a volcano|a library|"
    "a mushroom|a telescope|friendship|the Great Wall|a dolphin|paper|a windmill|an apple|jazz|a spider|a compass|the ocean|"
    "a pencil|a camel|the alphabet|a bridge|a rose|a clock|an eagle|sugar|a desert|a candle|the internet|a whale|a mirror|"
    "wheat|a castle|a snowflake"
)
TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 300
NUM_CALLERS = 4


def prompts() -> list[str]:
    """Fifty prompts, all different."""
    return [f"Describe {subject} in JSON." for subject in SUBJECTS.split("|")]


@dataclass(frozen=True)
class Row:
    """All prompts at one temperature, with or without the schema. `acceptance_length` is in tokens a round."""

    temperature: float
    structured: bool
    num_prompts: int
    num_valid: int
    num_tokens: int
    num_rounds: int
    acceptance_length: float

    @classmethod
    def of(cls, generations: Sequence[Generation], temperature: float, *, structured: bool) -> Row:
        """The row of these generations."""
        num_tokens = sum(each.output_tokens - 1 for each in generations)
        num_rounds = sum(each.statistics.rounds for each in generations)
        num_valid = sum(is_valid(each.text) for each in generations)
        return cls(
            temperature, structured, len(generations), num_valid, num_tokens, num_rounds, round(num_tokens / num_rounds, 3)
        )


def is_valid(text: str) -> bool:
    """True if the text is JSON of the schema."""
    try:
        return bool(jsonschema_rs.is_valid(SCHEMA, json.loads(text)))
    except json.JSONDecodeError:
        return False


async def measure(client: AsyncClient, said: Sequence[str], temperature: float, budget: int) -> list[Row]:
    """The rows of one temperature. Outputs without the schema are as long as those with it."""
    free = asyncio.Semaphore(NUM_CALLERS)

    async def ask(number: int, max_tokens: int, **options: Any) -> Generation:
        async with free:
            sampling = Sampling(temperature=temperature, seed=number)
            return await client.generate(said[number], sampling=sampling, max_tokens=max_tokens, budget=budget, **options)

    numbers = range(len(said))
    structured = await asyncio.gather(*(ask(number, MAX_TOKENS, json_schema=SCHEMA) for number in numbers))
    plain = await asyncio.gather(*(ask(number, structured[number].output_tokens, ignore_end=True) for number in numbers))
    return [Row.of(structured, temperature, structured=True), Row.of(plain, temperature, structured=False)]


async def main(arguments: argparse.Namespace) -> int:
    """Measure on a stack of its own; the exit code."""
    options = StackOptions(drafter=arguments.drafter, dtype=arguments.dtype, port=0)
    said = prompts()[: arguments.num_prompts]
    rows: list[Row] = []
    async with Stack(options) as stack, AsyncClient(stack.address) as client:
        for temperature in TEMPERATURES:
            rows += await measure(client, said, temperature, arguments.budget)
            for row in rows[-2:]:
                print(row, flush=True)
    if arguments.json is not None:
        result = {**provenance(), "drafter": options.chosen_drafter, "budget": arguments.budget, "dtype": arguments.dtype}
        arguments.json.write_text(f"{json.dumps({**result, 'rows': [asdict(row) for row in rows]}, indent=2)}\n")
    return 0 if all(row.num_valid == row.num_prompts for row in rows if row.structured) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--json", type=Path)
    sys.exit(asyncio.run(main(parser.parse_args())))
