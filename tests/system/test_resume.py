"""A generation whose gateway is lost goes on at the next one: the same tokens, none twice, when the caller asked for it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from gateway.tokenization import Tokenization
from tests.system.local_stack import MODEL, gateway_server, local_stack
from treewire import AsyncClient, Client, Sampling
from treewire.errors import Unavailable
from treewire.events import Chunk
from treewire.v1 import generate_pb2, generate_pb2_grpc
from verify_service.engines.simulated import SimulatedTarget

OPTIONS: dict[str, Any] = {"max_tokens": 120, "ignore_end": True, "deadline_seconds": 30.0}


@pytest.mark.parametrize("seed", [None, 5])
async def test_generation_outlives_its_gateway(seed: int | None) -> None:
    """The gateway dies twice in mid-stream and comes back at its address: text and tokens are those of an undisturbed one."""
    target = SimulatedTarget(MODEL, step_seconds=0.002)
    sampling = Sampling(temperature=1.0, seed=seed)
    async with local_stack(target) as stack, AsyncExitStack() as lives:
        assert stack.draft_running is not None
        behind = (stack.verify_running.address, stack.draft_running.address, Tokenization.simulated())
        life = gateway_server(*behind)
        running = await life.__aenter__()
        address = running.address
        events: list[Any] = []
        async with AsyncClient(address) as client, client.stream("go on", sampling=sampling, resume=True, **OPTIONS) as stream:
            async for event in stream:
                events.append(event)
                if len(events) in (6, 12):
                    await life.__aexit__(None, None, None)
                    life = gateway_server(*behind, address)
                    await life.__aenter__()
            generation = await stream.final()
        lives.push_async_exit(life)
        async with stack.client() as client:
            expected = await client.generate("go on", sampling=Sampling(temperature=1.0, seed=generation.seed), **OPTIONS)
    assert generation.token_ids == expected.token_ids
    assert generation.text == expected.text == "".join(event.text for event in events if isinstance(event, Chunk))
    assert generation.prompt_tokens == expected.prompt_tokens
    assert [type(event).__name__ for event in events].count("Started") == 1
    assert generation.output_tokens == 120


async def test_generation_goes_on_at_another_gateway() -> None:
    """Of two gateways side by side the one that runs the generation is lost for good: the other one ends it, token by token."""
    target = SimulatedTarget(MODEL, step_seconds=0.005)
    async with local_stack(target) as stack, AsyncExitStack() as lives:
        assert stack.draft_running is not None
        behind = (stack.verify_running.address, stack.draft_running.address, Tokenization.simulated())
        first = gateway_server(*behind)
        lost = await first.__aenter__()
        second = await lives.enter_async_context(gateway_server(*behind))
        async with (
            AsyncClient(f"ipv4:{lost.address},{second.address}") as client,
            client.stream("go on", sampling=Sampling(temperature=1.0, seed=5), resume=True, **OPTIONS) as stream,
        ):
            num_events = 0
            async for _ in stream:
                num_events += 1
                if num_events == 6:
                    assert lost.process.admission.num_running == 1
                    await first.__aexit__(None, None, None)
            generation = await stream.final()
        async with stack.client() as client:
            expected = await client.generate("go on", sampling=Sampling(temperature=1.0, seed=5), **OPTIONS)
    assert generation.token_ids == expected.token_ids
    assert generation.text == expected.text


async def test_stop_string_across_the_loss_is_found() -> None:
    """What was delivered counts when stop strings are looked for, and the maximum of tokens is of the whole."""
    async with local_stack() as stack, stack.client() as client:
        free = await client.generate("go on", **OPTIONS)
        stop = free.text[60:70]
        whole = await client.generate("go on", stop=[stop], **OPTIONS)
        stub = generate_pb2_grpc.GenerateServiceStub(grpc.aio.insecure_channel(stack.address))
        async with client.stream("go on", stop=[stop], **OPTIONS) as stream:
            chunks = [event async for event in stream if isinstance(event, Chunk)]
        for kept in range(1, len(chunks) + 1):
            delivered = [token_id for chunk in chunks[:kept] for token_id in chunk.token_ids]
            request = generate_pb2.GenerateRequest(
                chat=generate_pb2.Chat(messages=[generate_pb2.ChatMessage(role="user", content="go on")]),
                stop=[stop],
                max_tokens=120,
                ignore_end=True,
            )
            request.sampling.seed = whole.seed
            request.delivered.token_ids = b"".join(token_id.to_bytes(4, "little") for token_id in delivered)
            rest = [message async for message in stub.Generate(request)]
            text = "".join(chunk.text for chunk in chunks[:kept]) + "".join(message.chunk.text for message in rest)
            token_ids = [*delivered, *(token_id for message in rest for token_id in message.chunk.token_ids)]
            assert (text, tuple(token_ids)) == (whole.text, whole.token_ids)
            assert rest[-1].finished.stop == stop
            assert rest[-1].finished.num_output_tokens == len(token_ids) - len(delivered)


async def test_without_resume_the_loss_is_told() -> None:
    """Nothing is replayed unless the caller asks."""
    target = SimulatedTarget(MODEL, step_seconds=0.01)
    async with local_stack(target) as stack:
        life = gateway_server(stack.verify_running.address, "", Tokenization.simulated())
        running = await life.__aenter__()
        async with AsyncClient(running.address) as client, client.stream("go on", **OPTIONS) as stream:
            await anext(stream)
            await anext(stream)
            await life.__aexit__(None, None, None)
            with pytest.raises(Unavailable):
                await stream.final()


async def test_what_was_delivered_is_checked() -> None:
    """A seed is needed, and no more tokens than there may be."""
    async with local_stack() as stack:
        stub = generate_pb2_grpc.GenerateServiceStub(grpc.aio.insecure_channel(stack.address))
        for request, message in (
            (generate_pb2.GenerateRequest(), "delivered needs the seed"),
            (generate_pb2.GenerateRequest(sampling={"seed": 1}, max_tokens=1), "delivered has 2 tokens, from 1 to 1"),
        ):
            request.text = "go on"
            request.delivered.token_ids = (300).to_bytes(4, "little") * 2
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                _ = [message async for message in stub.Generate(request)]
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_synchronous_client_goes_on_too() -> None:
    """The same surface, the same outcome; and the deadline of the whole holds."""
    target = SimulatedTarget(MODEL, step_seconds=0.002)
    async with local_stack(target) as stack, AsyncExitStack() as lives:
        assert stack.draft_running is not None
        behind = (stack.verify_running.address, stack.draft_running.address, Tokenization.simulated())
        life = gateway_server(*behind)
        address = (await life.__aenter__()).address
        reached, died = threading.Event(), threading.Event()

        def generate() -> Any:
            with Client(address) as client, client.stream("go on", resume=True, **OPTIONS) as stream:
                for number, _ in enumerate(stream):
                    if number == 6:
                        reached.set()
                        died.wait()
                return stream.final()

        generating = asyncio.create_task(asyncio.to_thread(generate))
        await asyncio.to_thread(reached.wait)
        await life.__aexit__(None, None, None)
        died.set()
        again = gateway_server(*behind, address)
        await lives.enter_async_context(again)
        generation = await generating
        async with stack.client() as client:
            assert generation.token_ids == (await client.generate("go on", **OPTIONS)).token_ids
