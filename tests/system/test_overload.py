"""More than can be served: readers that read nothing, callers that come in crowds, deadlines that cannot be met."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from draft_service.engines.causal_lm import CausalLMDrafter
from draft_service.engines.simulated import SimulatedDrafter
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import MODEL, local_stack
from tests.system.test_failures import eventually
from treewire.errors import Overloaded
from treewire.v1 import generate_pb2, generate_pb2_grpc
from verify_service.engines.simulated import SimulatedTarget


async def test_reader_that_reads_nothing_is_left() -> None:
    """A stalled reader stops its generation after a few messages, and ends it after the limit; its place is free again."""
    target = SimulatedTarget(MODEL, max_context=100_000)
    async with local_stack(target, SimulatedDrafter(MODEL, max_context=100_000), stalled_reader_seconds=0.5) as stack:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        async with grpc.aio.insecure_channel(stack.address, options=options) as channel:
            request = generate_pb2.GenerateRequest(text="go on", max_tokens=50_000, ignore_end=True, include_rounds=True)
            call = generate_pb2_grpc.GenerateServiceStub(channel).Generate(request)
            await call.read()
            await eventually(lambda: stack.num_sessions == (1, 1))
            await eventually(lambda: stack.num_sessions == (0, 0))
            assert stack.gateway.admission.num_running == 0
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.details() == "the reader took no message for 0.5 s"
            rounds = stack.gateway.metrics.registry.get_sample_value("treewire_acceptance_length_count")
            assert rounds is not None
            assert rounds < 1000, "the generation ran far ahead of its reader"


async def test_deadline_that_cannot_be_met_is_refused_while_it_is_far() -> None:
    """With every place taken, who could not begin in time is told at once, not at the deadline."""
    target = SimulatedTarget(MODEL, step_seconds=0.02)
    async with local_stack(target, max_running=1, max_queued=50) as stack, stack.client() as client:
        await client.generate("go on", max_tokens=100, ignore_end=True)
        crowd = [asyncio.create_task(client.generate("go on", max_tokens=100, ignore_end=True)) for _ in range(5)]
        await eventually(lambda: stack.gateway.admission.num_queued == 4)
        with pytest.raises(Overloaded, match=r"s of waiting are ahead, the deadline is in 0\."):
            await client.generate("go on", max_tokens=1, deadline_seconds=0.3)
        assert [len((await each).token_ids) for each in crowd] == [100] * 5


async def test_drafter_without_room_costs_nothing_but_speed(tmp_path: Path) -> None:
    """Generations that outgrow the drafter's memory go on without guesses: the same tokens, and every page is free again."""
    path = save_tiny_model(tmp_path, "llama", vocab_size=MODEL.vocabulary_size)
    drafter = CausalLMDrafter.load(str(path), horizon=4, width=8, kv_tokens=96)
    texts = ["tell me about trees", "tell me about roots"]
    async with local_stack(drafter=drafter) as stack, stack.client() as client:
        plain = [await client.generate(text, max_tokens=60, ignore_end=True, budget=0) for text in texts]
        drafted = await asyncio.gather(*(client.generate(text, max_tokens=60, ignore_end=True, budget=12) for text in texts))
        await eventually(lambda: drafter.num_sessions == 0)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert any(each.statistics.lone_roots > 5 for each in drafted)
    assert all(each.statistics.draft_tokens > 0 for each in drafted)
    assert drafter.num_free_slots == 96
