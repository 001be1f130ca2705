"""This file is the acceptance report: how many tokens a round a drafter gains on a target, by budget, temperature and depth.

Every number comes from generations through a gateway. A *shape* is what trees are built: "tree", or "chain", which is a tree of
width one. Acceptance lengths count the bonus token, so plain decoding has 1.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from treewire.client import AsyncClient, AsyncStream
from treewire.events import Round
from treewire.stack import NGRAM, NO_DRAFTER, Stack, StackOptions
from treewire.types import Sampling

TREE, CHAIN = "tree", "chain"
_CHAIN_WIDTH = 1
NUM_RANKS_SHOWN = 4
SEED = 1
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short letter to a friend who has moved to another town.",
    "What is the difference between a list and a tuple in Python?",
    "Give me five ideas for a cheap dinner with rice.",
    "Summarise the water cycle for a child of ten.",
    "Write a function that returns the largest number of a list.",
    "How do I stop procrastinating when I study?",
    "Tell me a story about a lighthouse keeper and a lost ship.",
    "What are the main causes of inflation?",
    "List the planets of the solar system with one fact about each.",
    "Rewrite this politely: send me the report today.",
    "How does a bicycle stay upright?",
    "Compare living in a city with living in the country.",
    "What should I pack for a week of hiking in the mountains?",
    "Describe how bread is made, step by step.",
    "Why do leaves change colour in autumn?",
)


@dataclass(frozen=True)
class Setting:
    """What is measured in one go: a drafter's trees of one shape and budget at one temperature."""

    drafter: str
    shape: str
    budget: int
    temperature: float


@dataclass(frozen=True)
class Acceptance:
    """What was measured. `num_tokens` were gained in `num_rounds` rounds.

    `reached[d]` counts rounds whose accepted path has a node at depth d + 1, `ranks[d]` the ranks of those nodes among their
    siblings, 0 the drafter's best. `num_violations` counts rounds whose tree might differ from that of full-width marginals.
    """

    setting: Setting
    num_prompts: int
    num_rounds: int
    num_tokens: int
    num_violations: int
    reached: tuple[int, ...]
    ranks: tuple[Counter[int], ...]

    @property
    def mean_length(self) -> float:
        """Tokens a round, bonus included; 0 without rounds."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def reached_shares(self) -> tuple[float, ...]:
        """Of all rounds, the share that accepted a node at each depth from 1."""
        return tuple(count / self.num_rounds for count in self.reached)

    def to_json(self) -> dict[str, Any]:
        """The row that --json prints."""
        return {
            "drafter": self.setting.drafter,
            "shape": self.setting.shape,
            "budget": self.setting.budget,
            "temperature": self.setting.temperature,
            "mean_acceptance_length": round(self.mean_length, 4),
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
        }


@dataclass(frozen=True)
class Plan:
    """What to measure: every budget at every temperature on the same prompts, `concurrency` generations at once."""

    budgets: tuple[int, ...]
    temperatures: tuple[float, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    concurrency: int = 4

    def __post_init__(self) -> None:
        if not self.budgets or min(self.budgets) < 1:
            raise ValueError(f"budgets are {list(self.budgets)}, at least one of at least 1 is needed")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures are {list(self.temperatures)}, at least one of at least 0 is needed")
        if not self.prompts:
            raise ValueError("there are no prompts")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}, a round needs at least 2: the first is the prefill's")


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts of a file: one a line; of a .jsonl file the "prompt" of each line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return tuple(json.loads(line)["prompt"] if path.suffix == ".jsonl" else line for line in lines)


async def measure_stacks(
    options: StackOptions,
    plan: Plan,
    *,
    beams: Sequence[int] = (),
    started: Callable[[StackOptions], AbstractAsyncContextManager[Stack]],
    on_measured: Callable[[Acceptance], None],
) -> list[Acceptance]:
    """The drafter of `options` as trees, with each beam if some are given, and as chains, and the n-gram drafter's trees
    beside it, in a stack each."""
    measured = []
    for candidate in compared(options.drafter, beams):
        async with started(replace(options, drafter=candidate.drafter, beam=candidate.beam, port=0)) as stack:
            measured += await measure(
                stack.address, plan, drafter=candidate.name, shapes=candidate.shapes, on_measured=on_measured
            )
    return measured


class Candidate(NamedTuple):
    """A drafter that is measured, with its beam if that is not the drafter's default."""

    drafter: str
    beam: int | None
    shapes: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the report calls it."""
        return self.drafter if self.beam is None else f"{self.drafter} beam {self.beam}"


def compared(drafter: str, beams: Sequence[int] = ()) -> list[Candidate]:
    """What is measured beside what. A beam of 1 has no conditional rows; chains do not depend on the beam, and are measured
    once. Raises ValueError if there is no drafter, or for a beam below 1."""
    if drafter == NO_DRAFTER:
        raise ValueError(f"drafter is {drafter!r}, without one there is no acceptance to measure")
    if min(beams, default=1) < 1:
        raise ValueError(f"beams are {list(beams)}, each must be at least 1")
    first, *others = beams or (None,)
    own = [Candidate(drafter, first, (TREE, CHAIN)), *(Candidate(drafter, beam, (TREE,)) for beam in others)]
    return [Candidate(NGRAM, None, (TREE,)), *own]


async def measure(
    address: str,
    plan: Plan,
    *,
    drafter: str,
    shapes: Sequence[str] = (TREE, CHAIN),
    on_measured: Callable[[Acceptance], None],
) -> list[Acceptance]:
    """Measure whatever drafter stands behind a running gateway; its name is for the report."""
    measured = []
    async with AsyncClient(address) as client:
        for shape, temperature, budget in product(shapes, plan.temperatures, plan.budgets):
            measured.append(await _measured(client, plan, Setting(drafter, shape, budget, temperature)))
            on_measured(measured[-1])
    return measured


async def _measured(client: AsyncClient, plan: Plan, setting: Setting) -> Acceptance:
    places = asyncio.Semaphore(plan.concurrency)
    tally = _Tally()

    async def run(prompt: str) -> None:
        async with places, _stream(client, plan, setting, prompt) as stream:
            async for event in stream:
                if isinstance(event, Round):
                    tally.add(event)
            tally.num_violations += (await stream.final()).statistics.certificate_violations

    async with asyncio.TaskGroup() as group:
        for prompt in plan.prompts:
            group.create_task(run(prompt))
    return tally.acceptance(setting, len(plan.prompts))


def _stream(client: AsyncClient, plan: Plan, setting: Setting, prompt: str) -> AbstractAsyncContextManager[AsyncStream]:
    sampling = Sampling(temperature=setting.temperature, seed=SEED)
    width = _CHAIN_WIDTH if setting.shape == CHAIN else None
    return client.stream(
        prompt, sampling=sampling, budget=setting.budget, width=width, max_tokens=plan.max_tokens, include_rounds=True
    )


class _Tally:
    """Counts over rounds."""

    def __init__(self) -> None:
        self.num_violations = 0
        self._num_rounds = 0
        self._num_tokens = 0
        self._ranks: list[Counter[int]] = []

    def add(self, event: Round) -> None:
        """Count a round."""
        self._num_rounds += 1
        self._num_tokens += len(event.committed_token_ids)
        for depth, rank in enumerate(accepted_ranks(event.parents, event.accepted_nodes)):
            if depth == len(self._ranks):
                self._ranks.append(Counter())
            self._ranks[depth][rank] += 1

    def acceptance(self, setting: Setting, num_prompts: int) -> Acceptance:
        """What was counted."""
        return Acceptance(
            setting,
            num_prompts,
            self._num_rounds,
            self._num_tokens,
            self.num_violations,
            tuple(ranks.total() for ranks in self._ranks),
            tuple(self._ranks),
        )


def accepted_ranks(parents: Sequence[int], accepted_nodes: Sequence[int]) -> list[int]:
    """Rank of each accepted node, root excluded, among its siblings: a tree takes siblings best first, so their order tells."""
    return [parents[:node].count(parents[node]) for node in accepted_nodes[1:]]


def tables(measured: Sequence[Acceptance]) -> list[Table]:
    """The report for people: lengths by budget, shares by depth, ranks by depth."""
    lengths = Table(
        "drafter", "shape", "temperature", "budget", "tokens a round", "rounds", "violations", title="acceptance length"
    )
    depths = Table("drafter", "shape", "temperature", "budget", "share of rounds that reach depth 1, 2, ...", title="by depth")
    ranks = Table("drafter", "shape", "temperature", "budget", "depth", *_rank_names(), title="rank of the accepted node")
    for row in measured:
        setting = row.setting
        named = (setting.drafter, setting.shape, f"{setting.temperature:g}", str(setting.budget))
        lengths.add_row(*named, f"{row.mean_length:.3f}", str(row.num_rounds), str(row.num_violations))
        depths.add_row(*named, "  ".join(f"{share:.2f}" for share in row.reached_shares))
        if setting.shape == TREE and setting.budget == max(each.setting.budget for each in measured):
            for depth, counts in enumerate(row.ranks, start=1):
                ranks.add_row(*named, str(depth), *_rank_shares(counts))
    return [lengths, depths, ranks]


def _rank_names() -> list[str]:
    return [str(rank) for rank in range(NUM_RANKS_SHOWN)] + [f"{NUM_RANKS_SHOWN} and more"]


def _rank_shares(counts: Counter[int]) -> list[str]:
    shown = [counts[rank] for rank in range(NUM_RANKS_SHOWN)]
    return [f"{count / counts.total():.2f}" for count in (*shown, counts.total() - sum(shown))]


def draw(measured: Sequence[Acceptance], path: Path) -> None:
    """Write the lengths by budget, the shares by depth and the ranks by depth of the report as one PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (lengths, depths, ranks) = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    for label, rows in _by_line(measured).items():
        lengths.plot([row.setting.budget for row in rows], [row.mean_length for row in rows], marker="o", label=label)
        shares = rows[-1].reached_shares
        depths.plot(range(1, len(shares) + 1), shares, marker="o", label=f"{label}, budget {rows[-1].setting.budget}")
    _draw_ranks(ranks, max((row for row in measured if row.setting.shape == TREE), key=lambda row: row.setting.budget))
    lengths.set(xlabel="budget", ylabel="tokens a round, bonus included", title="acceptance length")
    depths.set(xlabel="depth", ylabel="share of rounds that reach it", title="acceptance by depth")
    for axes in (lengths, depths, ranks):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _by_line(measured: Sequence[Acceptance]) -> dict[str, list[Acceptance]]:
    lines: dict[str, list[Acceptance]] = {}
    for row in measured:
        lines.setdefault(f"{row.setting.drafter} {row.setting.shape}, T = {row.setting.temperature:g}", []).append(row)
    return lines


def _draw_ranks(axes: Any, row: Acceptance) -> None:
    below = [0.0] * len(row.ranks)
    for rank, name in enumerate(_rank_names()):
        shares = [float(_rank_shares(counts)[rank]) for counts in row.ranks]
        axes.bar(range(1, len(shares) + 1), shares, bottom=below, label=f"rank {name}")
        below = [low + share for low, share in zip(below, shares, strict=True)]
    setting = row.setting
    axes.set(xlabel="depth", ylabel="share", title=f"rank used: {setting.drafter}, budget {setting.budget}")
