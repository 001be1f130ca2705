"""The official client of OpenAI against the real stack: what it sends is understood, and it understands what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import openai
import pytest

from draft_service.engines.ngram import NgramDrafter
from gateway.tokenization import Tokenization
from tests.doors.eventually import eventually
from tests.system.local_stack import MODEL as SIMULATED
from tests.system.local_stack import LocalStack, local_stack
from treewire import Sampling
from treewire.weights import resolve
from verify_service.__main__ import prepare
from verify_service.engines.simulated import SimulatedTarget
from verify_service.settings import VerifySettings

MODEL = "under-test"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write 木 and 🌳 and é."}]
SEEDS = (1, 2, 3, 2**40)
SEEDED: Any = {"temperature": 1.0, "max_tokens": 150, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


class Rig(NamedTuple):
    """A stack and an asynchronous client of its HTTP door."""

    stack: LocalStack
    client: openai.AsyncOpenAI


@asynccontextmanager
async def rig(*args: Any, **options: Any) -> AsyncIterator[Rig]:
    async with local_stack(*args, http_bind="127.0.0.1:0", **options) as stack, async_client(stack) as client:
        yield Rig(stack, client)


def async_client(stack: LocalStack, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.http_url}/v1", api_key="none", max_retries=0, **options)


async def streamed_chat(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    return [chunk async for chunk in await client.chat.completions.create(stream=True, **options)]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("seed", SEEDS)
async def test_streaming_equals_not_streaming_equals_grpc_byte_for_byte(seed: int) -> None:
    """Over text with emoji, CJK and combining characters: one text and one list of tokens, in whatever way it is asked for."""
    async with rig() as (stack, client), stack.client() as grpc_client:
        create = client.chat.completions.create
        whole: Any = await create(model=MODEL, messages=MESSAGES, seed=seed, **SEEDED)
        commits = await streamed_chat(client, model=MODEL, messages=MESSAGES, seed=seed, **SEEDED)
        tokens = await streamed_chat(
            client, model=MODEL, messages=MESSAGES, seed=seed, stream_options={"per_token": True}, **SEEDED
        )
        over_grpc = await grpc_client.generate(
            messages=MESSAGES, sampling=Sampling(temperature=1.0, seed=seed), max_tokens=150, ignore_end=True
        )
    text = whole.choices[0].message.content
    assert any(ord(character) > 0x2000 for character in text)
    assert text.encode() == text_of(commits).encode() == text_of(tokens).encode() == over_grpc.text.encode()
    for chunks in (commits, tokens):
        assert [token_id for chunk in chunks for token_id in chunk.choices[0].token_ids] == list(over_grpc.token_ids)
    assert whole.choices[0].token_ids == list(over_grpc.token_ids)
    assert max(len(chunk.choices[0].token_ids) for chunk in commits) > 1
    assert max(len(chunk.choices[0].token_ids) for chunk in tokens) == 1


async def test_chat_is_answered_whole() -> None:
    """An answer has all that the client's types ask for, with usage and what speculation did."""
    async with rig() as (_, client):
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=20, extra_body={"ignore_eos": True}
        )
        answer: Any = raw.parse()
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
    block = answer.metrics["speculative_decoding"]
    steps, accepted = block["num_spec_steps"], block["num_accepted_draft_tokens"]
    assert sum(block["acceptance_histogram"]) == steps > 0
    assert sum(count * rounds for count, rounds in enumerate(block["acceptance_histogram"])) == accepted
    assert block["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert block["draft_acceptance_rate"] == pytest.approx(accepted / block["num_draft_tokens"])
    assert len(block["acceptance_histogram"]) == block["num_spec_tokens"] + 1
    assert raw.headers["x-request-id"] == answer.id.removeprefix("chatcmpl-")


async def test_chat_stream_has_openai_s_order() -> None:
    """The role first, then text, then the reason of the end, then usage if it was asked for."""
    async with rig() as (_, client):
        chunks = await streamed_chat(
            client, model=MODEL, messages=MESSAGES, max_tokens=20, stream_options={"include_usage": True}
        )
        without_usage = await streamed_chat(client, model=MODEL, messages=MESSAGES, max_tokens=20)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks] == [False] * (len(chunks) - 2) + [
        True,
        False,
    ]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0
    assert len({chunk.id for chunk in chunks}) == 1
    assert "usage" not in without_usage[-1].model_fields_set
    assert text_of(without_usage) == text_of(chunks)


async def test_metrics_are_null_where_nothing_was_drafted() -> None:
    """Without a drafter there is no acceptance to report."""
    async with rig(with_drafter=False) as (_, client):
        answer: Any = await client.completions.create(model=MODEL, prompt="go on", max_tokens=5)
    assert answer.metrics["speculative_decoding"] is None


async def test_completions_take_text_and_tokens() -> None:
    """A text, a list of one text and its token ids give the same continuation; stream or not."""
    async with rig() as (_, client):
        token_ids = (await client.post("/../tokenize", body={"prompt": "go on"}, cast_to=dict[str, Any]))["tokens"]  # type: ignore[type-var]
        prompts: list[Any] = ["go on", ["go on"], token_ids]
        answers = [await client.completions.create(model=MODEL, prompt=prompt, max_tokens=30) for prompt in prompts]
        chunks: Any = [
            chunk async for chunk in await client.completions.create(model=MODEL, prompt="go on", max_tokens=30, stream=True)
        ]
    texts = {answer.choices[0].text for answer in answers}
    assert texts == {"".join(chunk.choices[0].text for chunk in chunks)}
    assert chunks[-1].choices[0].finish_reason == answers[0].choices[0].finish_reason


async def test_stop_and_length_end_a_generation() -> None:
    """A stop string ends the text before it, and is told; without one the maximum does."""
    async with rig() as (_, client):
        options: Any = {"model": MODEL, "prompt": "go on", "extra_body": {"ignore_eos": True}}
        free = (await client.completions.create(max_tokens=60, **options)).choices[0]
        stop = free.text[20:24]
        for form in (stop, [stop, "never said"]):
            stopped: Any = (await client.completions.create(max_tokens=60, stop=form, **options)).choices[0]
            assert (stopped.text, stopped.finish_reason) == (free.text[: free.text.index(stop)], "stop")
            assert stopped.stop_reason == stop
    assert free.finish_reason == "length"


async def test_seed_repeats_a_generation_and_negative_ones_count() -> None:
    """The same seed, the same text; another, another."""
    async with rig() as (_, client):

        async def text(seed: int) -> str:
            options: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 30}
            return (await client.chat.completions.create(seed=seed, **options)).choices[0].message.content

        assert await text(-5) == await text(-5)
        assert await text(-5) != await text(5)


def test_synchronous_client() -> None:
    """Chat and completions, whole and streamed, through the client's synchronous half."""

    def talk(url: str) -> tuple[str, str, str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            options: Any = {"model": client.models.list().data[0].id, "max_tokens": 20}
            chat = client.chat.completions.create(messages=MESSAGES, **options)
            chunks = client.chat.completions.create(messages=MESSAGES, stream=True, **options)
            plain = client.completions.create(prompt="go on", **options)
            pieces = client.completions.create(prompt="go on", stream=True, **options)
            return (
                chat.choices[0].message.content or "",
                text_of(list(chunks)),
                plain.choices[0].text,
                "".join(piece.choices[0].text for piece in pieces),
            )

    async def main() -> tuple[str, str, str, str]:
        async with local_stack(http_bind="127.0.0.1:0") as stack:
            return await asyncio.to_thread(talk, stack.http_url)

    chat, streamed, plain, pieces = asyncio.run(main())
    assert chat == streamed != ""
    assert plain == pieces != ""


@pytest.mark.parametrize("stream", [False, True])
async def test_caller_that_leaves_frees_both_back_ends_within_a_round(stream: bool) -> None:
    """Closing the connection ends the generation, be it streamed or not."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.02)) as (stack, client):
        asking = asyncio.create_task(
            client.completions.create(
                model=MODEL, prompt="go on", max_tokens=3000, stream=stream, extra_body={"ignore_eos": True}
            )
        )
        await eventually(lambda: stack.num_sessions == (1, 1))
        if stream:
            chunks: Any = await asking
            await anext(aiter(chunks))
            await chunks.close()
        else:
            asking.cancel()
        await eventually(lambda: stack.num_sessions == (0, 0), seconds=1.0)
        assert stack.gateway.admission.num_running == 0


async def test_gateway_that_is_full_says_when_to_come_back() -> None:
    """429 with Retry-After, before and in spite of stream."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.02), max_running=1, max_queued=0) as (stack, client):
        options: Any = {"model": MODEL, "prompt": "go on", "extra_body": {"ignore_eos": True}}
        running = asyncio.create_task(client.completions.create(max_tokens=100, **options))
        await eventually(lambda: stack.num_sessions == (1, 1))
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(max_tokens=5, stream=stream, **options)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.type == "rate_limit_error"
        assert (await running).usage


async def test_failure_in_mid_stream_is_an_event_of_the_stream() -> None:
    """What fails after the first chunk reaches the client as an error with its message."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.02), with_drafter=False) as (stack, client):
        chunks: Any = await client.completions.create(
            model=MODEL, prompt="go on", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(chunks))
        await stack.verify_running.stop()
        with pytest.raises(openai.APIError) as caught:
            async for _ in chunks:
                pass
    assert caught.value.code == "unavailable"


@pytest.mark.model
@pytest.mark.timeout(1200)
async def test_real_model_speaks_over_http() -> None:
    """The small real model, its chat template and its tokenizer: whole, streamed and over gRPC the same text."""
    tokenization = Tokenization.from_directory(resolve("smollm2-135m", quiet=True))
    target = prepare(VerifySettings(model="smollm2-135m", threads=1)).load()
    async with rig(target, NgramDrafter(), tokenization=tokenization) as (stack, client), stack.client() as grpc_client:
        messages: Any = [{"role": "user", "content": "Name the three primary colours, and a tree: 木."}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16)
        chunks = await streamed_chat(client, model=MODEL, messages=messages, max_tokens=16)
        over_grpc = await grpc_client.generate(messages=messages, max_tokens=16)
    assert whole.choices[0].message.content == text_of(chunks) == over_grpc.text != ""
