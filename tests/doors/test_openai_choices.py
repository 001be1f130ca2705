"""Several choices and log-probabilities, asked for by the official client of OpenAI: those that gRPC gives, in its shapes."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from tests.doors.test_openai_client import MESSAGES, MODEL, async_client, rig, streamed_chat, text_of
from tests.system.local_stack import local_stack
from treewire import Sampling
from treewire.types import Acceptance, Generation
from treewire.vocabulary import SIMULATED_SPECIAL_TOKENS

SEED = 2**64 - 2
SEEDED: Any = {"model": MODEL, "temperature": 1.0, "seed": SEED - 2**64, "max_tokens": 40}
EXTRA: Any = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}


async def over_grpc(stack: Any, count: int, **options: Any) -> tuple[Generation, ...]:
    """What gRPC gives for the same request."""
    async with stack.client() as client:
        generations: tuple[Generation, ...] = await client.generate_all(
            sampling=Sampling(temperature=1.0, seed=SEED), max_tokens=40, ignore_end=True, num_log_probs=2, n=count, **options
        )
    return generations


async def test_chat_of_three_choices_with_log_probs() -> None:
    """Whole and streamed: choice i is the generation of seed + i, with its text, its tokens and their log-probs."""
    async with rig() as (stack, client):
        options: Any = {**SEEDED, **EXTRA, "messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 2}
        expected = await over_grpc(stack, 3, messages=MESSAGES)
        answer: Any = await client.chat.completions.create(**options)
        streams: Any = {}
        for per_token in (False, True):
            stream_options: Any = {"include_usage": True, "per_token": per_token}
            stream = await client.chat.completions.create(stream=True, stream_options=stream_options, **options)
            streams[per_token] = [chunk async for chunk in stream]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, generation in zip(answer.choices, expected, strict=True):
        assert choice.message.content == generation.text
        assert choice.token_ids == list(generation.token_ids)
        check_chat_log_probs(choice.logprobs.content, generation)
    for chunks in streams.values():
        assert [chunk.choices[0].index for chunk in chunks[:3]] == [0, 1, 2]
        assert all(chunk.choices[0].delta.role == "assistant" for chunk in chunks[:3])
        for generation in expected:
            own = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == generation.index]
            assert text_of(own) == generation.text
            assert [chunk.choices[0].finish_reason for chunk in own if chunk.choices[0].finish_reason] == ["length"]
            pieces = [chunk.choices[0].logprobs.content for chunk in own if chunk.choices[0].logprobs]
            check_chat_log_probs([entry for piece in pieces for entry in piece], generation)
        assert chunks[-1].choices == []
    assert max(len(chunk.choices[0].logprobs.content) for chunk in streams[True][3:-4] if chunk.choices[0].logprobs) == 1
    for usage, metrics in [(answer.usage, answer.metrics)] + [(each[-1].usage, each[-1].metrics) for each in streams.values()]:
        assert usage.prompt_tokens == expected[0].prompt_tokens
        assert usage.completion_tokens == 120 == usage.total_tokens - usage.prompt_tokens
        block = metrics["speculative_decoding"]
        assert sum(block["acceptance_histogram"]) == block["num_spec_steps"]
        assert block["num_spec_steps"] + block["num_accepted_draft_tokens"] + 3 == 120


def check_chat_log_probs(content: list[Any], generation: Generation) -> None:
    """One entry a token; the bytes of all of them are the text."""
    assert [entry.logprob for entry in content] == pytest.approx([entry.log_prob for entry in generation.log_probs])
    spoken = [bytes(entry.bytes) for entry in content if entry.token not in SIMULATED_SPECIAL_TOKENS]
    assert b"".join(spoken).decode(errors="replace") == generation.text
    for entry, expected in zip(content, generation.log_probs, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([log_prob for _, log_prob in expected.top])


async def test_completions_of_two_choices_with_log_probs() -> None:
    """The older shape: tokens, their log-probs, the likeliest by text, and where in the text each token begins."""
    async with rig() as (stack, client):
        options: Any = {**SEEDED, **EXTRA, "prompt": "go on", "n": 2, "logprobs": 2}
        expected = await over_grpc(stack, 2, text="go on")
        answer: Any = await client.completions.create(**options)
        chunks: Any = [chunk async for chunk in await client.completions.create(stream=True, **options)]
        bare: Any = await client.completions.create(**{**options, "logprobs": 0, "n": 1})
    for choice, generation in zip(answer.choices, expected, strict=True):
        log_probs = choice.logprobs
        assert choice.text == generation.text
        assert log_probs.token_logprobs == pytest.approx([entry.log_prob for entry in generation.log_probs])
        assert [max(each.values()) for each in log_probs.top_logprobs] == pytest.approx(
            [entry.top[0][1] for entry in generation.log_probs]
        )
        assert log_probs.text_offset[0] == 0
        for token, start in zip(log_probs.tokens, log_probs.text_offset, strict=True):
            assert "\\x" in token or choice.text[start:].startswith(token)
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [value for piece in own if piece.logprobs for value in getattr(piece.logprobs, name)]
            assert streamed == getattr(log_probs, name)
    assert bare.choices[0].logprobs.top_logprobs is None
    assert len(bare.choices[0].logprobs.tokens) == 40


async def test_log_probs_end_with_the_stop_string() -> None:
    """A stop string that a long commit runs past cuts choices, tokens and log-probs alike."""
    async with rig() as (_, client):
        options: Any = {"model": MODEL, "prompt": "go on", "max_tokens": 60, "logprobs": 1, **EXTRA}
        free = (await client.completions.create(**options)).choices[0]
        stop = free.text[20:24]
        stopped: Any = (await client.completions.create(stop=stop, **options)).choices[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert len(stopped.logprobs.tokens) == len(stopped.token_ids) < 60
    assert stopped.logprobs.token_logprobs == free.logprobs.token_logprobs[: len(stopped.token_ids)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"extra_body": {"accept": "caller"}}, "accept"),
        ({"extra_body": {"hybrid_width": 2}}, "hybrid_width"),
        ({"extra_body": {"accept": "hybrid", "hybrid_width": 99}}, "hybrid_width"),
    ],
)
async def test_what_is_out_of_range_is_refused_by_name(body: Any, param: str) -> None:
    """With OpenAI's error, before anything runs."""
    async with rig() as (stack, client):
        before = stack.target.positions_computed
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, **body)
        assert caught.value.param == param
        assert stack.target.positions_computed == before


async def test_refusal_of_one_choice_has_its_status() -> None:
    """More choices than there are places are refused with 429 though the first one could run, streamed or not."""
    async with rig(max_running=1, max_queued=1) as (stack, client):
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model=MODEL, prompt="go on", n=3, max_tokens=5, stream=stream)
        queued: Any = await client.completions.create(model=MODEL, prompt="go on", n=2, max_tokens=5)
        assert stack.num_sessions == (0, 0)
    assert len(queued.choices) == 2


def test_synchronous_client() -> None:
    """Choices, log-probs, stop, seed and structured output through the client's synchronous half, chat and completions."""

    def talk(url: str) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 10, "n": 2, "logprobs": True, "seed": 3}
            chat = client.chat.completions.create(**options)
            chunks = list(client.chat.completions.create(stream=True, **options))
            schema: Any = {"type": "object", "properties": {"kind": {"enum": ["oak", "ash"]}}, "required": ["kind"]}
            wanted: Any = {"type": "json_schema", "json_schema": {"name": "tree", "schema": schema}}
            held: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "response_format": wanted}
            whole = client.chat.completions.create(**held)
            pieces = list(client.chat.completions.create(stream=True, **held))
            prompt: Any = {"model": MODEL, "prompt": "go on", "max_tokens": 30, "logprobs": 1, "n": 2, **EXTRA}
            free = client.completions.create(**prompt)
            stop = free.choices[0].text[3:5]
            stopped = client.completions.create(stop=stop, **prompt)
            return chat, chunks, whole, pieces, free.choices[0].text, stop, stopped.choices[0].text

    async def main() -> Any:
        async with local_stack(http_bind="127.0.0.1:0") as stack, async_client(stack):
            return await asyncio.to_thread(talk, stack.http_url)

    chat, chunks, whole, pieces, free, stop, stopped = asyncio.run(main())
    for choice in chat.choices:
        own = [chunk for chunk in chunks if chunk.choices[0].index == choice.index]
        assert text_of(own) == choice.message.content != ""
        assert sum(len(chunk.choices[0].logprobs.content) for chunk in own if chunk.choices[0].logprobs) == len(
            choice.logprobs.content
        )
    assert json.loads(whole.choices[0].message.content)["kind"] in ("oak", "ash")
    assert text_of(pieces) == whole.choices[0].message.content
    assert stopped == free[: free.index(stop)]


async def test_rule_of_acceptance_is_chosen_over_http() -> None:
    """`accept` and `hybrid_width` mean what they mean over gRPC: at temperature 0 every rule gives the same text."""
    async with rig() as (stack, client):
        options: Any = {"model": MODEL, "prompt": "go on", "max_tokens": 30, "temperature": 0.0}
        texts = [
            (await client.completions.create(extra_body={"ignore_eos": True, **extra}, **options)).choices[0].text
            for extra in ({}, {"accept": "shared_noise"}, {"accept": "hybrid"}, {"accept": "hybrid", "hybrid_width": 1})
        ]
        async with stack.client() as own:
            sampling = Sampling(temperature=1.0, seed=5)
            given: Any = {"sampling": sampling, "max_tokens": 20, "ignore_end": True, "accept": Acceptance.HYBRID}
            expected = await own.generate(text="go on", **given)
        drawn: Any = {**options, "max_tokens": 20, "temperature": 1.0, "seed": 5}
        answered = await client.completions.create(extra_body={"ignore_eos": True, "accept": "hybrid"}, **drawn)
    assert len(set(texts)) == 1
    assert answered.choices[0].text == expected.text


async def test_response_format_holds_answers_to_json() -> None:
    """json_schema and json_object, whole and streamed, with the client's own parsing; and vLLM's structured_outputs."""

    class Tree(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        kind: Literal["oak", "ash"]
        ages: list[Annotated[int, pydantic.Field(ge=0, le=99)]] = pydantic.Field(max_length=3)

    async with rig() as (_, client):
        options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "temperature": 1.0, "seed": 3}
        parsed: Any = await client.chat.completions.parse(response_format=Tree, **options)
        stated: Any = {
            "type": "json_schema",
            "json_schema": {"name": "tree", "strict": True, "schema": Tree.model_json_schema()},
        }
        whole = await client.chat.completions.create(response_format=stated, n=2, **options)
        streamed = await streamed_chat(client, response_format=stated, **options)
        anything: Any = {"type": "json_object"}
        stop: Any = {"stop": ["}"]}  # the model of a hash would go on and on
        loose = await client.chat.completions.create(response_format=anything, **stop, **options)
        extra: Any = {"structured_outputs": {"regex": "(oak|ash){2}"}}
        plain = await client.completions.create(model=MODEL, prompt="go on", max_tokens=20, extra_body=extra)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                response_format={**stated, "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}, **options
            )
    assert isinstance(parsed.choices[0].message.parsed, Tree)
    for choice in whole.choices:
        Tree.model_validate_json(choice.message.content or "")
    assert text_of(streamed) == whole.choices[0].message.content
    assert (loose.choices[0].message.content or "").startswith("{")
    assert plain.choices[0].text in ("oakoak", "oakash", "ashoak", "ashash")
    assert caught.value.param == "response_format"
    assert "nonsense" in caught.value.message
