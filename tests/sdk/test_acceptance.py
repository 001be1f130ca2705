"""The acceptance report: what it counts, and the command as its users run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treewire.acceptance import CHAIN, TREE, Candidate, Plan, Setting, accepted_ranks, compared, measure, read_prompts

from ..system.local_stack import local_stack
from .test_cli import run


@pytest.mark.parametrize(
    ("parents", "accepted", "ranks"),
    [
        ((-1,), (0,), []),
        ((-1, 0, 1, 2), (0, 1, 2, 3), [0, 0, 0]),
        ((-1, 0, 0, 1, 2, 0, 2, 2), (0, 2, 7), [1, 2]),
        ((-1, 0, 0, 1, 2, 0), (0, 5), [2]),
    ],
)
def test_rank_is_the_place_among_the_siblings(parents: tuple[int, ...], accepted: tuple[int, ...], ranks: list[int]) -> None:
    """Trees take the children of a node best first, so a node's rank is how many of them came before it."""
    assert accepted_ranks(parents, accepted) == ranks


async def test_counts_are_those_of_the_generations() -> None:
    """Every round and token of every prompt counts once, at each budget; deeper trees accept no less."""
    plan = Plan(budgets=(2, 16), temperatures=(0.0,), prompts=("tell me about trees", "a", "once"), max_tokens=40)
    seen: list[Setting] = []
    async with local_stack() as stack:
        small, large, _, chain = await measure(
            stack.address, plan, drafter="simulated", on_measured=lambda row: seen.append(row.setting)
        )
        async with stack.client() as client:
            answers = [await client.generate(prompt, budget=16, max_tokens=40) for prompt in plan.prompts]
    assert seen == [Setting("simulated", shape, budget, 0.0) for shape in (TREE, CHAIN) for budget in (2, 16)]
    assert {rank for ranks in chain.ranks for rank in ranks} == {0}
    assert large.num_rounds == sum(answer.statistics.rounds for answer in answers)
    assert large.num_tokens >= sum(answer.output_tokens - 1 for answer in answers)
    assert large.num_violations == sum(answer.statistics.certificate_violations for answer in answers)
    assert large.mean_length > small.mean_length > 1.5
    assert sorted(large.reached_shares, reverse=True) == list(large.reached_shares)
    assert large.mean_length == pytest.approx(1 + sum(large.reached_shares))


def test_prompts_come_from_lines_or_from_json(tmp_path: Path) -> None:
    """A text file has a prompt a line, a .jsonl file one in each object."""
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "one\\ntwo", "source": "x"}\n')
    assert read_prompts(tmp_path / "a.txt") == ("one", "two")
    assert read_prompts(tmp_path / "b.jsonl") == ("one\ntwo",)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--budgets", "0,4"], "at least 1"),
        (["--budgets", "four"], "invalid literal"),
        (["--temperatures", "-1"], "at least 0"),
        (["--max-tokens", "1"], "at least 2"),
        (["--drafter", "none"], "no acceptance to measure"),
        (["--beams", "1,0"], "each must be at least 1"),
        (["--beams", "1,4", "--address", "localhost:1"], "beams are settings of a draft service"),
    ],
)
def test_wrong_numbers_are_refused(arguments: list[str], complaint: str) -> None:
    """Before anything starts, with the value."""
    status, _, error = run("acceptance", "--target", "simulated", *arguments)
    assert status != 0
    assert complaint in " ".join(error.replace("│", " ").split())


def test_report_of_own_stacks(tmp_path: Path) -> None:
    """Trees and chains of the drafter and trees of n-grams, each through a stack of its own; rows as JSON, and a picture."""
    png = tmp_path / "report.png"
    status, out, error = run(
        *("acceptance", "--target", "simulated", "--drafter", "simulated", "--budgets", "2,8", "--limit", "2"),
        *("--max-tokens", "24", "--png", str(png), "--json"),
    )
    assert status == 0, error
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["drafter"], row["shape"], row["budget"]) for row in rows] == [
        *(("ngram", TREE, budget) for budget in (2, 8)),
        *(("simulated", TREE, budget) for budget in (2, 8)),
        *(("simulated", CHAIN, budget) for budget in (2, 8)),
    ]
    assert set(rows[0]) == {"drafter", "shape", "budget", "temperature", "mean_acceptance_length", "prompts", "tokens"}
    assert all(row["prompts"] == 2 and row["mean_acceptance_length"] >= 1 for row in rows)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_beams_are_measured_beside_each_other() -> None:
    """Each beam's trees under a name of their own; chains, which no beam changes, once."""
    assert compared("dflash", (1, 4)) == [
        Candidate("ngram", None, (TREE,)),
        Candidate("dflash", 1, (TREE, CHAIN)),
        Candidate("dflash", 4, (TREE,)),
    ]
    assert [candidate.name for candidate in compared("dflash", (1, 4))] == ["ngram", "dflash beam 1", "dflash beam 4"]
    assert [candidate.name for candidate in compared("dflash")] == ["ngram", "dflash"]
