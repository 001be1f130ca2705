"""What `treewire bench` measures is what happened."""

from __future__ import annotations

import json

from tests.system.local_stack import local_stack
from treewire.bench import Mode, Plan, Row, measure, to_json

KEYS = {"system", "mode", "concurrency", "budget", "tokens_per_second", "mean_acceptance_length", "ttft_seconds"}


async def test_bench_measures_plain_chain_and_tree_side_by_side() -> None:
    """Every cell has a row; plain decoding gives one token a round, trees more; counts add up."""
    seen: list[Row] = []
    plan = Plan(budgets=(8,), concurrencies=(1, 3), num_prompts=3, max_tokens=24)
    async with local_stack() as stack:
        rows = await measure(stack.address, plan, on_row=seen.append)
    assert rows == seen
    assert [(row.mode, row.concurrency) for row in rows] == [(mode.value, count) for count in (1, 3) for mode in Mode]
    for row in rows:
        assert row.num_tokens <= 3 * 24
        assert sum(size * rounds for size, rounds in enumerate(row.tokens_per_round, start=1)) == row.num_tokens - 3
        assert row.tokens_per_second > 0
        assert abs(sum(row.stage_shares.values()) - 1) < 1e-9
    by_mode = {row.mode: row for row in rows if row.concurrency == 1}
    assert by_mode["plain"].mean_acceptance_length == 1.0
    assert by_mode["tree"].mean_acceptance_length > 1.5
    assert by_mode["plain"].num_tokens == by_mode["chain"].num_tokens == by_mode["tree"].num_tokens


def test_rows_are_json_with_the_agreed_keys() -> None:
    """Other tools read the rows by these names."""
    row = Row("treewire", "tree", 1, 8, 10.0, 2.0, 0.1, 0.05, 3, 60, {"verify": 1.0}, [3, 4])
    assert set(json.loads(json.dumps(to_json([row])))[0]) >= KEYS
