"""A generation whose target dies, hangs, drains, fails or is full: a pause, and the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.system.local_stack import MODEL, gateway_server
from tests.system.replicated import SEEDED, Replicated, replicated, undisturbed
from tests.system.test_failures import eventually
from treewire import AsyncClient, Sampling
from treewire.errors import InvalidRequest, Unavailable
from treewire.events import Chunk
from treewire.types import Generation
from verify_service.engines.simulated import SimulatedTarget, TargetFaults

NUM_TOKENS = 150


def slow_targets(count: int, **options: Any) -> list[SimulatedTarget]:
    """Targets slow enough for a test to act in mid-stream."""
    return [SimulatedTarget(MODEL, step_seconds=0.01, **options) for _ in range(count)]


async def generated(stack: Replicated, act: Any, sampling: Sampling | None = SEEDED, after: int = 8) -> Generation:
    """A generation in whose stream `act` runs once, after some chunks."""
    async with (
        stack.client() as client,
        client.stream("go on", sampling=sampling, max_tokens=NUM_TOKENS, ignore_end=True) as stream,
    ):
        num_chunks = 0
        async for event in stream:
            num_chunks += isinstance(event, Chunk)
            if isinstance(event, Chunk) and num_chunks == after:
                await act()
        return await stream.final()


def assert_exact(generation: Generation, expected: Generation) -> None:
    """Tokens, text, usage, and statistics that add up to what was emitted."""
    assert generation.token_ids == expected.token_ids
    assert generation.text == expected.text
    assert generation.finish_reason == expected.finish_reason
    assert generation.prompt_tokens == expected.prompt_tokens
    statistics = generation.statistics
    assert statistics.output_tokens == len(expected.token_ids)
    in_rounds = sum(size * count for size, count in enumerate(statistics.acceptance_histogram, start=1))
    assert 1 + in_rounds == len(expected.token_ids)
    assert statistics.accepted_tokens == in_rounds - statistics.rounds


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_target_that_dies_in_mid_stream_is_replaced(sampling: Sampling | None) -> None:
    """The replica that holds the session breaks off; another one goes on with the very next token."""
    expected = await undisturbed("go on", NUM_TOKENS, sampling)
    async with replicated(slow_targets(2)) as stack:

        async def lose() -> None:
            await stack.verify_running[stack.busy].stop()

        generation = await generated(stack, lose, sampling)
        assert stack.failovers("lost") == 1
    assert_exact(generation, expected)
    assert generation.statistics.mean_acceptance_length > 1.5


async def test_target_that_hangs_is_replaced_at_the_round_deadline() -> None:
    """A step that does not end costs the deadline of a round, then another replica goes on."""
    expected = await undisturbed("go on", NUM_TOKENS)
    targets = slow_targets(2)
    async with replicated(targets, verify_timeout_seconds=0.3) as stack:
        hanging = asyncio.Event()

        async def hang() -> None:
            thread = stack.verify[stack.busy].thread
            _ = asyncio.create_task(thread.call(lambda: asyncio.run(_hang(hanging))))  # noqa: RUF006 - ends with the test

        generation = await generated(stack, hang)
        hanging.set()
        assert stack.failovers("lost") >= 1
    assert_exact(generation, expected)


async def _hang(until: asyncio.Event) -> None:
    while not until.is_set():
        await asyncio.sleep(0.01)


async def test_step_that_raises_is_replayed() -> None:
    """One failing step is no failed generation, even if there is no other replica."""
    expected = await undisturbed("go on", NUM_TOKENS)
    targets = [SimulatedTarget(MODEL, faults=TargetFaults(fail_steps=frozenset({8, 9, 20})))]
    async with replicated(targets) as stack, stack.client() as client:
        generation = await client.generate("go on", sampling=SEEDED, max_tokens=NUM_TOKENS, ignore_end=True)
        assert stack.failovers("lost") >= 2
    assert_exact(generation, expected)


async def test_one_loss_after_another_changes_nothing() -> None:
    """Every replica but the last is lost, one by one, under many generations at once: each is exact, and nothing is left."""
    expected = {seed: await undisturbed("go on", NUM_TOKENS, Sampling(temperature=1.0, seed=seed)) for seed in range(6)}
    async with replicated(slow_targets(4), num_drafters=2) as stack, stack.client() as client:
        runs = [
            asyncio.create_task(
                client.generate("go on", sampling=Sampling(temperature=1.0, seed=seed), max_tokens=NUM_TOKENS, ignore_end=True)
            )
            for seed in expected
            for _ in range(2)
        ]
        for number in range(3):
            await asyncio.sleep(0.15)
            await stack.verify_running[number].stop()
        generations = await asyncio.gather(*runs)
        await eventually(lambda: stack.loads[3] == 0)
        assert stack.gateway.admission.num_running == 0
        assert sum(replica.num_sessions for replica in stack.gateway.verify.all) == 0
        assert stack.gateway.draft is not None
        await eventually(lambda: sum(replica.num_sessions for replica in stack.gateway.draft.all) == 0)  # type: ignore[union-attr]
    for generation in generations:
        assert_exact(generation, expected[generation.seed])


async def test_without_any_replica_the_caller_keeps_what_was_delivered() -> None:
    """UNAVAILABLE after the patience, with the beginning of the undisturbed output."""
    expected = await undisturbed("go on", NUM_TOKENS)
    async with replicated(slow_targets(1), failover_seconds=0.3) as stack, stack.client() as client:
        delivered: list[int] = []
        with pytest.raises(Unavailable, match="none of 1 replicas of treewire.v1.VerifyService is serving"):
            async with client.stream("go on", sampling=SEEDED, max_tokens=NUM_TOKENS, ignore_end=True) as stream:
                async for event in stream:
                    if isinstance(event, Chunk):
                        delivered.extend(event.token_ids)
                        if len(delivered) > 20:
                            await stack.verify_running[0].stop()
    assert 20 < len(delivered) < NUM_TOKENS
    assert tuple(delivered) == expected.token_ids[: len(delivered)]


async def test_what_can_never_succeed_is_not_tried_elsewhere() -> None:
    """A session that no empty target has room for is refused at once, with both numbers."""
    targets = slow_targets(2, max_tree_nodes=65, kv_tokens=300)
    async with replicated(targets, max_budget=64) as stack, stack.client() as client:
        with pytest.raises(InvalidRequest, match="345 KV slots.* 300"):
            await client.generate(token_ids=[300] * 280, max_tokens=2)
        assert stack.failovers("overloaded") == 0


async def test_generation_that_outgrows_the_target_is_replayed_when_there_is_room() -> None:
    """Generations for which there is room at first, not at the end: they wait for each other, all are exact."""
    samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    expected = [await undisturbed("go on", NUM_TOKENS, sampling) for sampling in samplings]
    targets = slow_targets(1, max_tree_nodes=17, kv_tokens=220)
    async with replicated(targets, max_budget=16) as stack, stack.client() as client:
        runs = [client.generate("go on", sampling=each, max_tokens=NUM_TOKENS, ignore_end=True) for each in samplings]
        generations = await asyncio.gather(*runs)
        assert stack.failovers("overloaded") >= 1
        assert stack.failovers("lost") == 0
    for generation, undisturbed_one in zip(generations, expected, strict=True):
        assert_exact(generation, undisturbed_one)


async def test_draining_replica_is_left_between_two_rounds() -> None:
    """The health of a replica flips to NOT_SERVING: its generations move at once."""
    expected = await undisturbed("go on", NUM_TOKENS)
    async with replicated(slow_targets(2), verify={"grace_seconds": 30.0}) as stack:
        draining: list[asyncio.Task[None]] = []
        left: list[int] = []

        async def drain() -> None:
            busy = stack.busy
            left.append(busy)
            draining.append(asyncio.create_task(stack.verify_running[busy].server.drain(asyncio.Event())))

        generation = await generated(stack, drain)
        async with asyncio.timeout(20):
            await draining[0]
        assert stack.failovers("draining") == 1
        assert stack.loads[left[0]] == 0
    assert_exact(generation, expected)


async def test_one_pool_of_drafters_serves_gateways_of_several_targets() -> None:
    """Two gateways side by side share targets and drafters, and nothing else; both give the same tokens."""
    expected = await undisturbed("go on", NUM_TOKENS)
    async with replicated(slow_targets(2), num_drafters=2) as stack:
        verify = ",".join(replica.address for replica in stack.gateway.verify.all)
        assert stack.gateway.draft is not None
        draft = ",".join(replica.address for replica in stack.gateway.draft.all)
        async with (
            gateway_server(verify, draft, stack.gateway.generations.serving.tokenization) as (address, _, _),
            AsyncClient(address) as second,
            stack.client() as first,
        ):
            runs = [
                client.generate("go on", sampling=SEEDED, max_tokens=NUM_TOKENS, ignore_end=True) for client in (first, second)
            ]
            for generation in await asyncio.gather(*runs):
                assert_exact(generation, expected)
                assert generation.statistics.mean_acceptance_length > 1.5
