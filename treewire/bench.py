"""This file is `treewire bench`: plain decoding, chains and trees through one stack, measured in one run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from statistics import fmean, median

import grpc

from treewire.client import AsyncClient
from treewire.core.budget import StepPrice
from treewire.types import Generation
from treewire.v1 import verify_pb2, verify_pb2_grpc

PROMPTS = (
    "What is the capital of Italy, and what is it known for?",
    "Count from one to fifteen in words.",
    "Write a short poem about rain.",
    "List six vegetables, then list them again in alphabetical order.",
    "Explain in three sentences how a bicycle stays upright.",
    "Write a Python function that reverses a list, with a docstring and an example.",
    "Translate 'thank you very much' into Italian, Dutch and Polish.",
    "What is 24 times 7? Show each step.",
    "Repeat the sentence 'rivers run to the sea' five times.",
    "Who painted the Mona Lisa, and where does it hang?",
    "Describe a harbour at dawn.",
    "Give four reasons to read books.",
    "Write JSON with the keys title, author and year for three books.",
    "What does the word 'resilient' mean? Use it in two sentences.",
    "Tell a very short story about a lighthouse and a lost boat.",
    "How do I make a cup of tea? Number the steps.",
    "Name the months of the year and how many days each has.",
    "Write an SQL query that counts the orders of each customer.",
    "Summarise: bees carry pollen from flower to flower, and many plants bear fruit only because of them.",
    "Compare a train and an aeroplane for a journey of 500 kilometres.",
    "Rewrite politely: give me the report now.",
    "What are the primary colours, and what do they mix to?",
    "Write a class in Python for a bank account with deposit and withdraw.",
    "Explain what a prime number is and list the first ten.",
)


class Mode(Enum):
    """How a generation is decoded."""

    PLAIN = "plain"
    CHAIN = "chain"
    TREE = "tree"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True)
class Row:
    """One measurement: `num_prompts` generations, `concurrency` of them at a time, of at most `max_tokens` tokens. An adaptive
    `budget` is the nodes that a round's tree had on average, rounded.

    `tokens_per_second` counts all streams together; `ttft_seconds` and `seconds_per_token` are medians over generations,
    the latter per token after the first.
    """

    system: str
    mode: str
    concurrency: int
    budget: int
    tokens_per_second: float
    mean_acceptance_length: float
    ttft_seconds: float
    seconds_per_token: float
    num_prompts: int
    num_tokens: int
    stage_shares: dict[str, float]
    tokens_per_round: list[int]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    budgets: Sequence[int] = (8, 16)
    concurrencies: Sequence[int] = (1, 4, 16)
    num_prompts: int = 16
    max_tokens: int = 96

    @classmethod
    def quick(cls) -> Plan:
        """What ends within minutes on two cores with the default model."""
        return cls(budgets=(8,), concurrencies=(1, 4), num_prompts=6, max_tokens=48)

    def cells(self) -> list[tuple[Mode, int, int]]:
        """Mode, budget and concurrency of every measurement; those to be compared stand side by side in time."""
        return [
            (mode, budget, concurrency)
            for concurrency in self.concurrencies
            for mode, budget in (
                (Mode.PLAIN, 0),
                *((Mode.CHAIN, budget) for budget in self.budgets[:1]),
                *((Mode.TREE, budget) for budget in self.budgets),
                (Mode.ADAPTIVE, 0),
            )
        ]


async def measure(address: str, plan: Plan, *, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Measure every cell of the plan against the gateway at `address`, one after the other.

    Where the gateway's own budget is a fixed one there is nothing adaptive to measure.
    """
    return await measure_cells(address, plan, plan.cells(), on_row=on_row)


async def measure_cells(
    address: str,
    plan: Plan,
    cells: Sequence[tuple[Mode, int, int]],
    *,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure these modes, budgets and concurrencies with the plan's prompts."""
    rows = []
    async with AsyncClient(address) as client:
        await client.generate(PROMPTS[0], max_tokens=8)  # the first request pays for what is loaded lazily
        adapts = (await client.model()).adaptive_budget
        for mode, budget, concurrency in cells:
            if mode is Mode.ADAPTIVE and not adapts:
                continue
            rows.append(await _row(client, plan, mode, budget, concurrency))
            on_row(rows[-1])
    return rows


async def step_prices(verify_address: str) -> list[StepPrice]:
    """What the target's steps take, as its service tells; empty if it measured none."""
    async with grpc.aio.insecure_channel(verify_address, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = await verify_pb2_grpc.VerifyServiceStub(channel).GetTarget(verify_pb2.GetTargetRequest())
    return [StepPrice(price.num_nodes, price.batch_size, price.seconds) for price in answer.limits.prices]


async def _row(client: AsyncClient, plan: Plan, mode: Mode, budget: int, concurrency: int) -> Row:
    prompts = itertools.islice(itertools.cycle(PROMPTS), max(plan.num_prompts, concurrency))
    started = time.perf_counter()
    generations = [each async for each in _generations(client, list(prompts), plan, mode, budget, concurrency)]
    seconds = time.perf_counter() - started
    num_tokens = sum(len(each.token_ids) for each in generations)
    num_rounds = sum(each.statistics.rounds for each in generations)
    return Row(
        system="treewire",
        mode=mode.value,
        concurrency=concurrency,
        budget=_mean_nodes(generations) if mode is Mode.ADAPTIVE else budget,
        tokens_per_second=num_tokens / seconds,
        mean_acceptance_length=(num_tokens - len(generations)) / num_rounds if num_rounds else 0.0,
        ttft_seconds=median(each.statistics.ttft_seconds for each in generations),
        seconds_per_token=median(_seconds_per_token(each) for each in generations),
        num_prompts=len(generations),
        num_tokens=num_tokens,
        stage_shares=_stage_shares(generations),
        tokens_per_round=_tokens_per_round(generations),
    )


async def _generations(
    client: AsyncClient, prompts: Sequence[str], plan: Plan, mode: Mode, budget: int, concurrency: int
) -> AsyncIterator[Generation]:
    places = asyncio.Semaphore(concurrency)

    async def generation(prompt: str) -> Generation:
        async with places:
            width = 1 if mode is Mode.CHAIN else None
            asked = None if mode is Mode.ADAPTIVE else budget
            return await client.generate(prompt, budget=asked, width=width, max_tokens=plan.max_tokens)

    for finished in asyncio.as_completed([generation(prompt) for prompt in prompts]):
        yield await finished


def _mean_nodes(generations: Sequence[Generation]) -> int:
    num_nodes = sum(each.statistics.draft_tokens for each in generations)
    return round(num_nodes / max(1, sum(each.statistics.rounds for each in generations)))


def _seconds_per_token(generation: Generation) -> float:
    statistics = generation.statistics
    num_later_tokens = max(1, len(generation.token_ids) - 1)
    return (statistics.total_seconds - statistics.ttft_seconds) / num_later_tokens


def _stage_shares(generations: Sequence[Generation]) -> dict[str, float]:
    stages = sorted({stage for each in generations for stage in each.statistics.stage_seconds if "." not in stage})
    seconds = {stage: fmean(each.statistics.stage_seconds.get(stage, 0.0) for each in generations) for stage in stages}
    total = sum(seconds.values()) or 1.0
    return {stage: value / total for stage, value in seconds.items()}


def _tokens_per_round(generations: Sequence[Generation]) -> list[int]:
    """Rounds by the number of tokens they gave, index 0 for one token."""
    longest = max((len(each.statistics.acceptance_histogram) for each in generations), default=0)
    histograms = [each.statistics.acceptance_histogram for each in generations]
    return [sum(histogram[index] for histogram in histograms if index < len(histogram)) for index in range(longest)]


def to_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as JSON objects."""
    return [asdict(row) for row in rows]
