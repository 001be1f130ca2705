"""The adaptive budget in a running stack: trees where they pay, plain decoding where they do not, the same tokens always."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from draft_service.engines.simulated import SimulatedDrafter
from gateway.assembly import FALLBACK_BUDGET
from tests.system.local_stack import MODEL, LocalStack, local_stack
from treewire.core.budget import StepPrice
from treewire.events import Finished, Round
from treewire.types import Generation
from verify_service.engine import TargetEngine
from verify_service.engines.simulated import SimulatedTarget

STEP_SECONDS = 0.03


def flat(engine: TargetEngine) -> Sequence[StepPrice]:
    """A target whose step takes what it takes, however many nodes it has."""
    return [StepPrice(nodes, batch, STEP_SECONDS) for nodes, batch in product((1, 8, 64), (1, 8))]


async def generated(stack: LocalStack, num_tokens: int, budget: int | None = None) -> Generation:
    """An answer of so many tokens."""
    async with stack.client() as client:
        return await client.generate("go on", max_tokens=num_tokens, ignore_end=True, budget=budget)


async def test_large_trees_where_nodes_are_free() -> None:
    """A flat price and a drafter that is right take trees beyond the fixed default, told in statistics, rounds and metrics."""
    target = SimulatedTarget(MODEL, step_seconds=STEP_SECONDS)
    async with local_stack(target, SimulatedDrafter(MODEL, agreement=0.9), verify={"measure": flat}) as stack:
        async with stack.client() as client:
            assert (await client.model()).adaptive_budget
            async with client.stream("go on", max_tokens=60, ignore_end=True, include_rounds=True) as stream:
                events = [event async for event in stream]
        plain = await generated(stack, 60, budget=0)
        seen = stack.gateway.metrics.registry.get_sample_value("treewire_tree_nodes_bucket", {"le": "8.0"})
    rounds = [event for event in events if isinstance(event, Round)]
    (finished,) = (event for event in events if isinstance(event, Finished))
    sizes = [len(event.token_ids) - 1 for event in rounds]
    assert max(sizes) > FALLBACK_BUDGET
    assert [sizes.count(nodes) for nodes in range(max(sizes) + 1)] == list(finished.statistics.rounds_by_nodes)
    assert [token for event in rounds for token in event.committed_token_ids][:59] == list(plain.token_ids[1:])
    assert seen == plain.statistics.rounds + sum(nodes <= 8 for nodes in sizes)
    assert {"draft.step", "verify.step", "verify.service_queue", "verify.service_walk"} <= rounds[-1].stage_seconds.keys()
    assert {"verify.encode", "verify.decode", "tree_build"} <= rounds[-1].stage_seconds.keys()


async def test_plain_decoding_with_a_drafter_that_is_always_wrong() -> None:
    """It is asked now and then, most rounds go without, and the tokens are those of plain decoding."""
    target = SimulatedTarget(MODEL, step_seconds=0.002)
    drafter = SimulatedDrafter(MODEL, agreement=0.0)

    def steep(engine: TargetEngine) -> Sequence[StepPrice]:
        return [StepPrice(nodes, batch, 0.002 * nodes) for nodes, batch in product((1, 8, 64), (1, 8))]

    async with local_stack(target, drafter, verify={"measure": steep}) as stack:
        adaptive, plain = await generated(stack, 300), await generated(stack, 300, budget=0)
    assert adaptive.token_ids == plain.token_ids
    assert adaptive.statistics.lone_roots > 0.8 * adaptive.statistics.rounds


async def test_fixed_budgets_stay() -> None:
    """Without prices every round has the fallback; a request's own budget, and a gateway's, hold in each round."""
    async with local_stack(drafter=SimulatedDrafter(MODEL, agreement=0.9)) as stack:
        fallback, asked = await generated(stack, 80), await generated(stack, 80, budget=3)
    assert len(fallback.statistics.rounds_by_nodes) == FALLBACK_BUDGET + 1
    assert len(asked.statistics.rounds_by_nodes) == 4
    async with local_stack(drafter=SimulatedDrafter(MODEL, agreement=0.9), verify={"measure": flat}, budget=5) as stack:
        fixed = await generated(stack, 80)
        async with stack.client() as client:
            assert not (await client.model()).adaptive_budget
    assert len(fixed.statistics.rounds_by_nodes) == 6
