"""What fails, and what the user sees. Numbers in the names are those of the bug reports from the field."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.engine import DraftEngine
from draft_service.engines.simulated import DrafterFaults, SimulatedDrafter
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from tests.system.local_stack import MODEL, draft_server, gateway_server, local_stack, verify_server
from treewire import Sampling
from treewire.errors import Incompatible, InternalError, InvalidRequest, Overloaded, Unavailable
from treewire.events import Round
from treewire.runtime.channel import open_channel
from treewire.types import Options
from verify_service.engines.simulated import SimulatedTarget, TargetFaults

SEEDED = Sampling(temperature=1.0, seed=11)


async def eventually(condition: Any, seconds: float = 20.0) -> None:
    """Wait until the condition holds; fails if it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def expected_tokens(sampling: Sampling | None = SEEDED, max_tokens: int = 200) -> tuple[int, ...]:
    """What an undisturbed stack gives without drafts."""
    async with local_stack(with_drafter=False) as stack, stack.client() as client:
        return (await client.generate("go on", sampling=sampling, max_tokens=max_tokens, ignore_end=True)).token_ids


async def test_drafter_killed_in_mid_stream_costs_nothing_but_speed() -> None:
    """The same tokens as undisturbed; the rounds behind the loss are lone roots."""
    expected = await expected_tokens()
    async with local_stack() as stack, stack.client() as client:
        assert stack.draft_running is not None
        async with client.stream("go on", sampling=SEEDED, max_tokens=200, ignore_end=True) as stream:
            num_chunks = 0
            async for _ in stream:
                num_chunks += 1
                if num_chunks == 10:
                    await stack.draft_running.stop()
            generation = await stream.final()
    assert generation.token_ids == expected
    assert generation.statistics.lone_roots > 20
    assert generation.statistics.draft_tokens > 0


async def test_drafter_that_comes_back_is_used_again() -> None:
    """A generation that lost its drafter opens a new session from the committed prefix once there is one again."""
    expected = await expected_tokens(max_tokens=400)
    sizes: list[int] = []
    async with AsyncExitStack() as lifetime:
        stack = await lifetime.enter_async_context(local_stack(SimulatedTarget(MODEL, step_seconds=0.01)))
        client = await lifetime.enter_async_context(stack.client())
        assert stack.draft_running is not None
        options: Options = {"sampling": SEEDED, "max_tokens": 400, "ignore_end": True, "include_rounds": True}
        stream = await lifetime.enter_async_context(client.stream("go on", **options))
        async for event in stream:
            if not isinstance(event, Round):
                continue
            sizes.append(len(event.token_ids))
            if len(sizes) == 5:
                await stack.draft_running.stop()
            if len(sizes) == 30:
                revived = draft_server(SimulatedDrafter(MODEL), stack.draft_running.address)
                await lifetime.enter_async_context(revived)
        generation = await stream.final()
    assert generation.token_ids == expected
    assert min(sizes[:4]) > 1
    assert sizes[10:30] == [1] * 20
    assert sizes[-2] > 1, "the drafter was not used again after it came back"


@pytest.mark.parametrize(
    "faults",
    [
        DrafterFaults(malformed_every=3),
        DrafterFaults(fail_steps=frozenset({2, 5, 6})),
        DrafterFaults(hang_steps=frozenset({3}), hang_seconds=1.0),
        DrafterFaults(die_at_step=4),
    ],
    ids=["malformed blocks", "failing steps", "hanging step", "dead engine"],
)
async def test_faulty_drafter_does_not_change_the_output(faults: DrafterFaults) -> None:
    """Malformed blocks, failing, hanging and dead engines: the same tokens, and the losses are counted."""
    expected = await expected_tokens()
    drafter = SimulatedDrafter(MODEL, faults=faults)
    async with local_stack(drafter=drafter, draft_timeout_seconds=0.2) as stack, stack.client() as client:
        generation = await client.generate("go on", sampling=SEEDED, max_tokens=200, ignore_end=True)
        losses = stack.gateway.metrics.registry.get_sample_value("treewire_drafter_losses_total")
    assert generation.token_ids == expected
    assert losses is not None
    assert losses >= 1


async def test_5_stops_do_not_depend_on_the_drafter() -> None:
    """Every drafter, and none: the same stop string ends the generation at the same token."""
    results = []
    drafters: list[DraftEngine | None] = [None, SimulatedDrafter(MODEL), SimulatedDrafter(MODEL, agreement=0.1)]
    for drafter in drafters:
        async with local_stack(drafter=drafter, with_drafter=drafter is not None) as stack, stack.client() as client:
            free = await client.generate("go on", max_tokens=120, ignore_end=True)
            stop = free.text[40:44]
            stopped = await client.generate("go on", max_tokens=120, ignore_end=True, stop=[stop])
            results.append((stopped.text, stopped.token_ids, stopped.finish_reason))
            assert stopped.text == free.text[: free.text.index(stop)]
            assert stopped.finish_reason == "stop"
    assert results[0] == results[1] == results[2]


async def test_6_counters_derive_from_what_was_emitted() -> None:
    """Accepted tokens and rounds add up to the output, in the statistics and in the metrics, even when a stop cuts a round."""
    async with local_stack() as stack, stack.client() as client:
        totals = [0, 0]
        for max_tokens in (1, 2, 3, 5, 17, 40):
            generation = await client.generate("go on", max_tokens=max_tokens, ignore_end=True)
            statistics = generation.statistics
            assert len(generation.token_ids) == max_tokens == statistics.output_tokens
            in_rounds = sum(size * count for size, count in enumerate(statistics.acceptance_histogram, start=1))
            assert 1 + in_rounds == max_tokens
            assert statistics.accepted_tokens <= in_rounds
            totals[0] += statistics.accepted_tokens
            totals[1] += statistics.draft_tokens
        value = stack.gateway.metrics.registry.get_sample_value
        assert value("treewire_accepted_tokens_total") == totals[0]
        assert value("treewire_draft_tokens_total") == totals[1]


async def test_7_19_one_terminal_message_and_nothing_twice() -> None:
    """Chunks add up to the whole, one finished event ends the stream, and nothing follows it."""
    async with local_stack() as stack, stack.client() as client, client.stream("go on", max_tokens=60) as stream:
        events = [event async for event in stream]
        generation = await stream.final()
    kinds = [type(event).__name__ for event in events]
    assert kinds[0] == "Started"
    assert kinds.count("Started") == kinds.count("Finished") == 1
    assert kinds[-1] == "Finished"
    chunks = [event for event in events if type(event).__name__ == "Chunk"]
    assert "".join(chunk.text for chunk in chunks) == generation.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == generation.token_ids


async def test_20_time_per_output_token_is_per_token() -> None:
    """The histogram counts every token after the first, not every chunk."""
    async with local_stack() as stack, stack.client() as client:
        generation = await client.generate("go on", max_tokens=50, ignore_end=True)
        count = stack.gateway.metrics.registry.get_sample_value("treewire_time_per_output_token_seconds_count")
    assert generation.statistics.rounds < 49
    assert count == 49


async def test_22_long_prompt_passes_and_one_past_the_limit_is_refused_with_both_numbers() -> None:
    """A prompt of megabytes is no trouble for messages; what is too long is said to be, with value and limit."""
    target = SimulatedTarget(MODEL, max_context=1 << 21, kv_tokens=1 << 22)
    async with (
        local_stack(target, SimulatedDrafter(MODEL, max_context=1 << 21), verify={"prefill_chunk_tokens": 1 << 16}) as stack,
        stack.client() as client,
    ):
        long_prompt = [300 + number % 700 for number in range(1_200_000)]
        generation = await client.generate(token_ids=long_prompt, max_tokens=4)
        assert len(generation.token_ids) == 4
        with pytest.raises(InvalidRequest, match=r"text is 1000001 characters long, from 1 to 1,000,000 are taken"):
            await client.generate(text="a" * 1_000_001)


async def test_23_client_that_leaves_frees_both_back_ends_within_a_round() -> None:
    """Leaving a stream early releases the session on the target and on the drafter."""
    async with local_stack(SimulatedTarget(MODEL, step_seconds=0.02)) as stack, stack.client() as client:
        async with client.stream("go on", max_tokens=2000, ignore_end=True) as stream:
            for _ in range(5):
                await anext(stream)
            assert stack.num_sessions == (1, 1)
        await eventually(lambda: stack.num_sessions == (0, 0), seconds=1.0)
        steps = stack.target.positions_computed
        await asyncio.sleep(0.1)
        assert stack.target.positions_computed == steps


async def test_200_streams_started_and_dropped_leave_nothing() -> None:
    """No session, no task and no growing number of objects remain of streams that were dropped at all stages."""
    async with local_stack(SimulatedTarget(MODEL, step_seconds=0.001)) as stack, stack.client() as client:

        async def start_and_drop(number: int) -> None:
            async with client.stream("go on", max_tokens=1000, ignore_end=True) as stream:
                for _ in range(number % 7):
                    await anext(stream)

        async def drop(count: int) -> None:
            await asyncio.gather(*(start_and_drop(number) for number in range(count)))
            await eventually(lambda: stack.num_sessions == (0, 0) and stack.gateway.admission.num_running == 0)

        await drop(200)  # what is cached for later requests, prefixes above all, is cached now
        gc.collect()
        tasks, objects = len(asyncio.all_tasks()), len(gc.get_objects())
        await drop(200)
        await asyncio.sleep(0.2)
        gc.collect()
        assert len(asyncio.all_tasks()) <= tasks
        assert len(gc.get_objects()) - objects < 2000
        assert stack.verify.service.num_sessions == 0
        assert stack.draft is not None
        assert stack.draft.service.num_sessions == 0


async def health_of(address: str, service: str) -> int:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_25_target_that_always_fails_fails_its_generations_and_lives_on() -> None:
    """Steps that raise again and again are INTERNAL for those in them, after a bounded number of tries."""
    target = SimulatedTarget(MODEL, faults=TargetFaults(fail_steps=frozenset({8, 9})))
    async with local_stack(target, with_drafter=False, failover_attempts=1) as stack, stack.client() as client:
        with pytest.raises(InternalError):
            await client.generate("go on", max_tokens=50, ignore_end=True)
        assert len((await client.generate("go on", max_tokens=50, ignore_end=True)).token_ids) == 50
        await eventually(lambda: stack.num_sessions == (0, 0))


async def test_25_dead_engine_fails_in_flight_generations() -> None:
    """Whoever waits is told, and whoever comes later too; nobody hangs."""
    target = SimulatedTarget(MODEL, faults=TargetFaults(die_at_step=8))
    async with local_stack(target, with_drafter=False, failover_attempts=2) as stack, stack.client() as client:
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable):
                await client.generate("go on", max_tokens=500, ignore_end=True)
            with pytest.raises(Unavailable):
                await client.generate("go on", max_tokens=5)
        assert stack.verify.thread.died.is_set()


@pytest.mark.parametrize("drafter_context", [40, 60, 4096])
async def test_26_generation_reaches_the_longest_context_exactly(drafter_context: int) -> None:
    """Drafting stops near the drafter's limit and trees shrink near the target's: the last tokens are exact."""
    async with local_stack(SimulatedTarget(MODEL, max_context=100), with_drafter=False) as stack, stack.client() as client:
        expected = await client.generate("go on", sampling=SEEDED, max_tokens=1000, ignore_end=True)
    target, drafter = SimulatedTarget(MODEL, max_context=100), SimulatedDrafter(MODEL, max_context=drafter_context)
    async with local_stack(target, drafter) as stack, stack.client() as client:
        generation = await client.generate("go on", sampling=SEEDED, max_tokens=1000, ignore_end=True, budget=64)
    assert generation.token_ids == expected.token_ids
    assert generation.finish_reason == "length"
    assert generation.prompt_tokens + len(generation.token_ids) == 100


@pytest.mark.parametrize(
    ("request_options", "message"),
    [
        ({"text": ""}, "text is 0 characters long"),
        ({"token_ids": []}, "tokens has 0 tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0, at least 1 is taken"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens is -1"),
        ({"prompt": "a", "budget": 1_000_000}, "budget is 1000000, from 0 to 256 is taken"),
        ({"prompt": "a", "width": 0}, "width is 0, from 1 to 64 is taken"),
        ({"prompt": "a", "stop": [""]}, "stop is a string of 0 characters"),
        ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids is 99999, the vocabulary has ids from 0 to 1023"),
        ({"prompt": "a", "sampling": Sampling(temperature=-1)}, "temperature is -1.0, it must be from 0.0 to 100.0"),
        ({"prompt": "a", "sampling": Sampling(top_p=0)}, "top_p is 0, it must be above 0"),
        ({"prompt": "a", "sampling": Sampling(temperature=float("nan"))}, "temperature is nan"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "role is 'wizard', known are system, user, assistant"),
        ({"token_ids": [5000]}, "token 5000, the vocabulary has ids from 0 to 1023"),
    ],
)
async def test_27_what_cannot_be_done_is_refused_with_value_and_limit(request_options: dict[str, Any], message: str) -> None:
    """INVALID_ARGUMENT, and the server lives on."""
    async with local_stack() as stack, stack.client() as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate(**request_options)
        assert message in str(caught.value)
        assert caught.value.request_id
        assert (await client.generate("a", max_tokens=3)).token_ids


async def test_28_vocabulary_of_another_model_is_refused() -> None:
    """A gateway does not start in front of another model's target, and a drafter of another vocabulary is not used."""
    async with verify_server(SimulatedTarget(MODEL, tokenizer_hash="of another model")) as (running, _):
        with pytest.raises(Incompatible, match="tokenizer_hash: .* of another model"):
            async with gateway_server(running.address, "", Tokenization.simulated()):
                raise AssertionError("the gateway started")
    hash_of_ours = Tokenization.simulated().hash
    target = SimulatedTarget(MODEL, tokenizer_hash=hash_of_ours)
    stranger = SimulatedDrafter(MODEL, tokenizer_hash="of another drafter")
    async with local_stack(target, stranger) as stack, stack.client() as client:
        generation = await client.generate("go on", max_tokens=30, ignore_end=True)
        losses = stack.gateway.metrics.registry.get_sample_value("treewire_drafter_losses_total")
    assert len(generation.token_ids) == 30
    assert generation.statistics.draft_tokens == 0
    assert losses == 1, "a drafter that does not fit is not asked again"


async def test_overload_is_refused_with_a_time_to_come_back() -> None:
    """Beyond what runs and waits, a request is turned away at once; those before it end well."""
    target = SimulatedTarget(MODEL, step_seconds=0.01)
    async with local_stack(target, max_running=2, max_queued=1) as stack, stack.client() as client:
        tasks = [asyncio.create_task(client.generate("go on", max_tokens=40, ignore_end=True)) for _ in range(3)]
        await eventually(lambda: stack.gateway.admission.num_queued == 1)
        with pytest.raises(Overloaded) as caught:
            await client.generate("go on", max_tokens=5)
        assert caught.value.retry_after_seconds
        assert [len((await task).token_ids) for task in tasks] == [40, 40, 40]


async def test_full_kv_memory_keeps_the_newcomer_waiting() -> None:
    """A session for which the target has no room now begins when there is room; the running one goes on."""
    target = SimulatedTarget(MODEL, max_tree_nodes=65, kv_tokens=300, step_seconds=0.005)
    async with local_stack(target, max_budget=64) as stack, stack.client() as client:
        running = asyncio.create_task(client.generate("go on", max_tokens=120, ignore_end=True))
        await eventually(lambda: stack.num_sessions[0] == 1)
        newcomer = await client.generate(token_ids=[300] * 225, max_tokens=2)
        assert len((await running).token_ids) == 120
        assert len(newcomer.token_ids) == 2


async def test_full_kv_memory_turns_the_newcomer_away_in_the_end() -> None:
    """Overloaded once the longest wait is over; the running one goes on."""
    target = SimulatedTarget(MODEL, max_tree_nodes=65, kv_tokens=300, step_seconds=0.02)
    async with local_stack(target, max_budget=64, max_wait_seconds=0.2) as stack, stack.client() as client:
        running = asyncio.create_task(client.generate("go on", max_tokens=120, ignore_end=True))
        await eventually(lambda: stack.num_sessions[0] == 1)
        with pytest.raises(Overloaded):
            await client.generate(token_ids=[300] * 225, max_tokens=2)
        assert len((await running).token_ids) == 120


def test_default_gateway_settings_bind_loopback_alone() -> None:
    """Nothing is reachable from other machines unless it was asked for."""
    assert GatewaySettings().listen.is_loopback
