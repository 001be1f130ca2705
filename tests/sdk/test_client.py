"""What the two clients promise, against gateways written by hand."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing, suppress

import grpc
import psutil
import pytest

from treewire import AsyncClient, Client, errors, events
from treewire.types import Generation, Statistics
from treewire.v1 import generate_pb2

from .gateways import chunk, endless, finished, one_answer, serving, silent, started

SOON_SECONDS = 20.0
WHOLE = Generation(
    text="Hello",
    token_ids=(5, 6, 7, 8),
    finish_reason="stop",
    stop="END",
    prompt_tokens=3,
    statistics=Statistics(
        output_tokens=4,
        rounds=2,
        lone_roots=1,
        draft_tokens=9,
        accepted_tokens=1,
        acceptance_histogram=(1, 1),
        ttft_seconds=0.5,
        total_seconds=2.0,
        stage_seconds={"verify": 1.5, "draft": 0.5},
        certificate_violations=1,
    ),
    model="toy",
    request_id="request-7",
    seed=2**63,
)


async def test_generate_gives_the_whole_generation():
    """Both clients give the same generation, every field of it."""
    async with serving(one_answer) as gateway, AsyncClient(gateway.address) as client:
        assert await client.generate("Hi") == WHOLE
        with Client(gateway.address) as sync_client:
            assert await asyncio.to_thread(sync_client.generate, "Hi") == WHOLE


def test_metrics_are_those_defined():
    """Acceptance length leaves the prefill's token out; speed counts all tokens over all time."""
    assert WHOLE.statistics.mean_acceptance_length == 1.5
    assert WHOLE.statistics.tokens_per_second == 2.0
    assert WHOLE.output_tokens == 4


async def test_events_are_typed_and_sum_to_the_final_text():
    """Events come in order, typed; the chunks' text and tokens are those of the generation (nothing only at the end)."""
    async with (
        serving(one_answer) as gateway,
        AsyncClient(gateway.address) as client,
        client.stream("Hi") as stream,
    ):
        seen = [event async for event in stream]
        assert stream.text == "Hello"
        generation = await stream.final()
    assert [type(event) for event in seen] == [events.Started, *[events.Chunk] * 3, events.Finished]
    chunks = [event for event in seen if isinstance(event, events.Chunk)]
    assert "".join(event.text for event in chunks) == generation.text
    assert sum((event.token_ids for event in chunks), ()) == generation.token_ids


async def test_round_events_have_the_tree_and_the_commit():
    """A round says which tree was verified and what of it was committed."""

    async def with_a_round(request, context):
        assert request.include_rounds
        yield started()
        message = generate_pb2.Round(scores=[0.0, -0.5], accepted_nodes=[0, 1], stage_seconds={"verify": 0.25})
        message.node_texts.extend(["a", "b"])
        message.bonus_text = "c"
        message.tree.token_ids.extend([4, 9])
        message.tree.parents.extend([-1, 0])
        message.commit.token_ids.extend([9, 2])
        message.commit.length = 7
        yield generate_pb2.GenerateResponse(round=message)
        yield finished(0)

    async with (
        serving(with_a_round) as gateway,
        AsyncClient(gateway.address) as client,
        client.stream("Hi", include_rounds=True) as stream,
    ):
        rounds = [event async for event in stream if isinstance(event, events.Round)]
    assert rounds == [events.Round((4, 9), (-1, 0), (0.0, -0.5), (0, 1), (9, 2), 7, {"verify": 0.25}, ("a", "b"), "c")]


async def test_final_reads_what_is_left():
    """`final` after a partial read gives the whole generation, on both clients, and may be asked twice."""

    def read_in_part(address):
        with Client(address) as client, client.stream("Hi") as stream:
            next(stream)
            next(stream)
            assert stream.text == "Hel"
            return stream.final(), stream.final()

    async with serving(one_answer) as gateway:
        assert await asyncio.to_thread(read_in_part, gateway.address) == (WHOLE, WHOLE)
        async with AsyncClient(gateway.address) as client, client.stream("Hi") as stream:
            await anext(stream)
            assert await stream.final() == await stream.final() == WHOLE


async def test_leaving_an_async_stream_cancels_the_call():
    """A caller that breaks out of the loop is gone from the gateway at once."""
    async with serving(endless) as gateway, AsyncClient(gateway.address) as client:
        async with client.stream("Hi") as stream:
            async for event in stream:
                if isinstance(event, events.Chunk):
                    break
        await asyncio.wait_for(gateway.call_ended.wait(), SOON_SECONDS)


async def broken_off(request, context):
    """Some words, then the end of the gateway."""
    yield started()
    yield chunk("word ", 1)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


async def reason_of_failure(client):
    """Why a generation failed, and nothing else that holds on to it: pytest.raises would."""
    try:
        if isinstance(client, AsyncClient):
            await client.generate("Hi")
        else:
            await asyncio.to_thread(client.generate, "Hi")
    except errors.TreewireError as error:
        return error.reason
    return None


@pytest.mark.parametrize("client_type", [AsyncClient, Client])
async def test_failed_call_leaves_no_connection_behind(client_type):
    """A closed client is closed, without waiting for the garbage collector to find the call that failed."""
    async with serving(broken_off) as gateway:
        gc.disable()
        try:
            client = client_type(gateway.address)
            assert await reason_of_failure(client) == "UNAVAILABLE"
            assert num_connections(gateway.address) == 1
            closing = client.close()
            if closing is not None:
                await closing
            async with asyncio.timeout(SOON_SECONDS):
                while num_connections(gateway.address):
                    await asyncio.sleep(0.05)
        finally:
            gc.enable()


def num_connections(address: str) -> int:
    """This process's open connections to the address."""
    port = int(address.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port for each in connections if each.raddr)


async def test_leaving_a_sync_stream_cancels_the_call():
    """The synchronous client cancels as the asynchronous one does."""

    def leave_early(client):
        with client.stream("Hi") as stream:
            for event in stream:
                if isinstance(event, events.Chunk):
                    return

    async with serving(endless) as gateway:
        with Client(gateway.address) as client:
            await asyncio.to_thread(leave_early, client)
            await asyncio.wait_for(gateway.call_ended.wait(), SOON_SECONDS)


async def test_an_exception_in_the_block_cancels_the_call():
    """The user's own exception comes through, and the call is cancelled."""

    async def fail_half_way(client):
        async with client.stream("Hi") as stream:
            await anext(stream)
            raise ZeroDivisionError

    async with serving(endless) as gateway, AsyncClient(gateway.address) as client:
        with pytest.raises(ZeroDivisionError):
            await fail_half_way(client)
        await asyncio.wait_for(gateway.call_ended.wait(), SOON_SECONDS)


async def test_closing_a_generator_around_a_stream_cancels_the_call():
    """A user's generator that is closed half-way (GeneratorExit) cancels the call, on both clients."""

    async def words(client):
        async with client.stream("Hi") as stream:
            async for event in stream:
                yield event

    async with serving(endless) as gateway, AsyncClient(gateway.address) as client:
        async with aclosing(words(client)) as generator:
            await anext(generator)
        await asyncio.wait_for(gateway.call_ended.wait(), SOON_SECONDS)

    def take_one(client):
        def words():
            with client.stream("Hi") as stream:
                yield from stream

        generator = words()
        next(generator)
        generator.close()

    async with serving(endless) as gateway:
        with Client(gateway.address) as sync_client:
            await asyncio.to_thread(take_one, sync_client)
            await asyncio.wait_for(gateway.call_ended.wait(), SOON_SECONDS)


async def test_cancelling_the_task_cancels_the_call():
    """A task that is cancelled while it waits for a token takes its call with it."""
    async with serving(silent) as gateway, AsyncClient(gateway.address) as client:
        task = asyncio.create_task(client.generate("Hi"))
        await asyncio.wait_for(gateway.caller_came.wait(), SOON_SECONDS)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gateway.call_ended.wait(), SOON_SECONDS)


async def test_a_closed_stream_refuses_to_be_read():
    """Reading on behind the block is an error that says so, not a hang and not an empty end."""
    async with serving(endless) as gateway, AsyncClient(gateway.address) as client:
        async with client.stream("Hi") as stream:
            await anext(stream)
        with pytest.raises(RuntimeError, match="closed"):
            await anext(stream)


async def test_the_deadline_becomes_deadline_exceeded_with_its_value():
    """A call that outlives its deadline says which deadline, and which request."""
    async with serving(silent) as gateway, AsyncClient(gateway.address) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"0\.5 s") as caught:
            await client.generate("Hi", deadline_seconds=0.5)
        assert caught.value.request_id == "request-7"
        with (
            Client(gateway.address, timeout_seconds=0.25) as sync_client,
            pytest.raises(errors.DeadlineExceeded, match=r"0\.25 s"),
        ):
            await asyncio.to_thread(sync_client.generate, "Hi")


async def test_unavailable_before_the_first_message_is_tried_again():
    """A gateway that is away for a moment is not seen by the caller."""

    async def away_twice(request, context):
        if gateway.attempts <= 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        async for response in one_answer(request, context):
            yield response

    async with serving(away_twice) as gateway, AsyncClient(gateway.address) as client:
        assert await client.generate("Hi") == WHOLE
        assert gateway.attempts == 3


async def test_four_attempts_are_the_most():
    """A gateway that stays away is Unavailable after four attempts, on both clients."""

    async def away(request, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        yield started()

    async with serving(away) as gateway, AsyncClient(gateway.address) as client:
        with pytest.raises(errors.Unavailable, match="draining"):
            await client.generate("Hi")
        assert gateway.attempts == 4
        with Client(gateway.address) as sync_client, pytest.raises(errors.Unavailable, match="draining"):
            await asyncio.to_thread(sync_client.generate, "Hi")
        assert gateway.attempts == 8


async def test_unavailable_after_the_first_message_is_not_tried_again():
    """What was delivered is never delivered twice: the error comes through, after the text."""

    async def lost_half_way(request, context):
        yield started()
        yield chunk("half", 1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")

    async with (
        serving(lost_half_way) as gateway,
        AsyncClient(gateway.address) as client,
        client.stream("Hi") as stream,
    ):
        with pytest.raises(errors.Unavailable, match="lost") as caught:
            await stream.final()
        assert stream.text == "half"
        assert caught.value.request_id == "request-7"
        assert gateway.attempts == 1


async def test_overload_carries_the_time_of_another_try():
    """The error's class, message, retry time and request id cross the wire, without retries."""

    async def full(request, context):
        error = errors.Overloaded("12 of 12 wait", retry_after_seconds=1.5, request_id="request-9")
        status = errors.to_status(error)
        await context.abort(status.code, status.message, status.trailing_metadata)
        yield started()

    async with serving(full) as gateway, AsyncClient(gateway.address) as client:
        with pytest.raises(errors.Overloaded, match="12 of 12") as caught:
            await client.generate("Hi")
        assert (caught.value.retry_after_seconds, caught.value.request_id) == (1.5, "request-9")
        assert gateway.attempts == 1


@pytest.mark.parametrize(
    ("responses", "message"),
    [([], "first event"), ([started()], "last event"), ([started(), chunk("a", 1), finished(2)], "1 tokens and counted 2")],
)
async def test_a_stream_that_does_not_add_up_is_an_internal_error(responses, message):
    """A stream without its start or end, or whose tokens differ from their count, is never taken for a generation."""

    async def odd(request, context):
        for response in responses:
            yield response

    async with serving(odd) as gateway, AsyncClient(gateway.address) as client:
        with pytest.raises(errors.InternalError, match=message):
            await client.generate("Hi")


async def test_token_and_version_travel_with_the_call():
    """The bearer token and the user agent are those of the client."""
    async with serving(one_answer) as gateway, AsyncClient(gateway.address, token="secret") as client:
        await client.generate("Hi")
        assert gateway.metadata["authorization"] == "Bearer secret"
        assert gateway.metadata["user-agent"].startswith("treewire-python/")


def test_the_environment_is_read_only_for_what_is_not_given(monkeypatch):
    """TREEWIRE_ADDRESS stands in for an address that is None, and never for one that is given."""
    monkeypatch.setenv("TREEWIRE_ADDRESS", "gateway.example:1")
    with Client() as client, Client("127.0.0.1:2") as other:
        assert (client.address, other.address) == ("gateway.example:1", "127.0.0.1:2")
    monkeypatch.delenv("TREEWIRE_ADDRESS")
    assert AsyncClient().address == "127.0.0.1:50050"


async def test_no_gateway_is_unavailable():
    """An address where nobody listens is Unavailable."""
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable):
            await client.model()
