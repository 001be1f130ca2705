"""Sampling options through a whole stack. Numbers in the names are those of the bug reports from the field."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from draft_service.engines.simulated import SimulatedDrafter
from gateway.sessions import SessionRequest
from tests.system.local_stack import MODEL, LocalStack, local_stack
from treewire import Sampling, wire
from treewire.core.build import build_tree
from treewire.core.sampling import Sampling as CoreSampling
from treewire.core.simulated import Prefix, SimulatedModel
from treewire.core.tree import Marginals
from treewire.errors import InvalidRequest, Unsupported
from treewire.types import Acceptance, Generation, Request
from treewire.v1 import generate_pb2_grpc, tree_pb2
from verify_service.engines.simulated import SimulatedTarget

PROMPT = "tell me about trees and tell me about trees"
PENALISED = Sampling(
    temperature=0.9,
    seed=4,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    logit_bias={300: 4.0, 301: -100.0},
)
GREEDY_PENALISED = replace(PENALISED, temperature=0.0, frequency_penalty=2.0, logit_bias={300: 25.0})


async def generate(stack: LocalStack, sampling: Sampling | None, **options: object) -> Generation:
    async with stack.client() as client:
        return await client.generate(PROMPT, sampling=sampling, **{"max_tokens": 64, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [PENALISED, GREEDY_PENALISED], ids=["sampled", "greedy"])
async def test_8_9_penalties_are_exact_under_trees(sampling: Sampling) -> None:
    """With penalties and bias the tokens are those of plain decoding for every budget, drafts are accepted, and the penalties
    do something."""
    async with local_stack() as stack:
        plain = await generate(stack, sampling, budget=0)
        drafted = await asyncio.gather(*(generate(stack, sampling, budget=budget) for budget in (1, 8, 64)))
        without = await generate(stack, Sampling(temperature=sampling.temperature, seed=sampling.seed), budget=0)
    assert [generation.token_ids for generation in drafted] == [plain.token_ids] * 3
    assert plain.token_ids != without.token_ids
    assert drafted[-1].statistics.mean_acceptance_length > 1.5


@pytest.mark.parametrize("budget", [0, 8, 64])
async def test_9_min_tokens_counts_tokens_not_rounds(budget: int) -> None:
    """The end has no chance before min_tokens tokens, and comes as soon as it may, in the middle of a round too."""
    sampling = Sampling(logit_bias={300: 100.0}, min_tokens=13)
    async with local_stack() as stack:
        generation = await generate(stack, sampling, budget=budget, stop_token_ids=[300])
    assert generation.token_ids.index(300) == 13
    assert generation.output_tokens == 14
    assert generation.finish_reason == "stop"


async def test_9_min_tokens_holds_back_the_model_s_own_end() -> None:
    """A model that ends early goes on until it may end."""
    model = SimulatedModel(mean_length=3)
    async with local_stack(SimulatedTarget(model), SimulatedDrafter(model)) as stack:
        short, held = await generate(stack, None), await generate(stack, Sampling(min_tokens=20))
    assert short.output_tokens < 20 <= held.output_tokens
    assert model.end_token_id not in held.token_ids[:20]


async def test_10_11_defaults_are_resolved_once_at_the_edge() -> None:
    """A request without temperature takes the gateway's; with top_k 1 it is greedy; a seed is told."""
    async with local_stack(temperature=1.0) as stack:
        first, second = await generate(stack, None, budget=8), await generate(stack, None, budget=8)
        greedy = await generate(stack, Sampling(temperature=0.0))
        top = await generate(stack, Sampling(top_k=1))
    assert first.token_ids != second.token_ids
    assert first.seed != second.seed
    assert top.token_ids == greedy.token_ids != first.token_ids


async def test_13_the_drafter_samples_as_the_request_does() -> None:
    """A drafter that knows the model and applies the whole chain is always right, at any temperature and with penalties."""
    drafter = SimulatedDrafter(MODEL, agreement=1.0)
    async with local_stack(drafter=drafter, width=1) as stack:
        for sampling in (PENALISED, GREEDY_PENALISED, Sampling(temperature=1.0, top_p=0.6, seed=3), Sampling(min_tokens=60)):
            generation = await generate(stack, sampling, budget=7, ignore_end=True)
            assert generation.statistics.mean_acceptance_length > 6, sampling


def own_log_probs(prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> list[float]:
    """The simulated model's log-prob of each token, computed here."""
    expected = []
    for count, token_id in enumerate(token_ids):
        (logits,) = MODEL.logits([Prefix.of((*prompt, *token_ids[:count]))]).tolist()
        highest = max(logits)
        expected.append(logits[token_id] - highest - math.log(sum(math.exp(logit - highest) for logit in logits)))
    return expected


@pytest.mark.parametrize("accept", Acceptance)
@pytest.mark.parametrize("sampling", [None, PENALISED], ids=["greedy", "sampled"])
async def test_14_15_each_emitted_token_has_the_target_s_log_prob(sampling: Sampling | None, accept: Acceptance) -> None:
    """One entry a token in every chunk, the prefill's and those of long runs included: the model's own log-probability."""
    prompt = (5, 6, 7)
    async with local_stack() as stack, stack.client() as client:
        request = Request(token_ids=prompt, sampling=sampling, accept=accept, num_log_probs=2, max_tokens=40)
        async with client.stream(**vars(request)) as stream:
            chunks = [event async for event in stream if hasattr(event, "log_probs")]
            generation = await stream.final()
    assert all(len(chunk.log_probs) == len(chunk.token_ids) for chunk in chunks)
    assert generation.statistics.accepted_tokens > 3
    assert [entry.log_prob for entry in generation.log_probs] == pytest.approx(
        own_log_probs(prompt, generation.token_ids), abs=1e-4
    )
    assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.top[1][1] for entry in generation.log_probs)
    assert len({entry.log_prob for entry in generation.log_probs}) > 20


async def test_15_log_probs_end_where_the_tokens_do() -> None:
    """A stop in the middle of a run cuts log-probs with the tokens; none come unasked, zero likeliest is a value."""
    async with local_stack() as stack:
        whole = await generate(stack, None, num_log_probs=0, max_tokens=30)
        stop = whole.token_ids[17]
        cut = await generate(stack, None, num_log_probs=0, max_tokens=30, stop_token_ids=[stop])
        bare = await generate(stack, None, max_tokens=30)
    assert len(cut.log_probs) == cut.output_tokens == whole.token_ids.index(stop) + 1
    assert cut.log_probs == whole.log_probs[: cut.output_tokens]
    assert all(entry.top == () for entry in whole.log_probs)
    assert bare.log_probs == ()


async def refused(address: str, message: object) -> None:
    """Send a message as it is; raises what the gateway answers."""
    import grpc

    from treewire.errors import from_rpc_error

    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async for _ in generate_pb2_grpc.GenerateServiceStub(channel).Generate(message):
                pass
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def test_refusals_name_field_and_limit() -> None:
    """Prompt log-probs, caller acceptance at the gateway and values out of range are refused by name."""
    async with local_stack() as stack, stack.client() as client:
        message = Request(text="a").to_message()
        message.num_prompt_log_probs = 0
        with pytest.raises(Unsupported, match="num_prompt_log_probs"):
            await refused(client.address, message)
        message = Request(text="a").to_message()
        message.accept = tree_pb2.ACCEPTANCE_CALLER
        with pytest.raises(Unsupported, match="ACCEPTANCE_CALLER"):
            await refused(client.address, message)
        for options, name in (
            ({"n": 17}, "n is 17, from 1 to 16"),
            ({"n": 0}, "n is 0"),
            ({"num_log_probs": 21}, "num_log_probs is 21"),
            ({"hybrid_width": 2}, "hybrid_width is 2, it goes with ACCEPTANCE_HYBRID"),
            ({"sampling": Sampling(logit_bias={1024: 1.0})}, "logit_bias: token is 1024"),
        ):
            with pytest.raises(InvalidRequest, match=name):
                await client.generate("a", **options)  # type: ignore[arg-type]


async def test_several_generations_of_one_request() -> None:
    """Generation i is what a request with the seed + i alone gives; events of all come interleaved, each with its index."""
    sampling = Sampling(temperature=1.0, seed=2**64 - 1)
    async with local_stack() as stack, stack.client() as client:
        async with client.stream(PROMPT, sampling=sampling, n=3, max_tokens=40, num_log_probs=0) as stream:
            events = [event async for event in stream]
            generations = await stream.finals()
        alone = [
            await client.generate(PROMPT, sampling=replace(sampling, seed=seed), max_tokens=40) for seed in (2**64 - 1, 0, 1)
        ]
        assert (await client.generate_all(PROMPT, sampling=sampling, n=2, max_tokens=40))[1].token_ids == alone[1].token_ids
        while stack.num_sessions != (0, 0):
            await asyncio.sleep(0.01)
    assert [generation.token_ids for generation in generations] == [generation.token_ids for generation in alone]
    assert [generation.text for generation in generations] == [generation.text for generation in alone]
    assert [generation.seed for generation in generations] == [2**64 - 1, 0, 1]
    assert [generation.index for generation in generations] == [0, 1, 2]
    assert all(len(generation.log_probs) == generation.output_tokens for generation in generations)
    assert len([event for event in events if hasattr(event, "finish_reason")]) == 3


@pytest.mark.parametrize("width", [1, 2, 5])
async def test_hybrid_acceptance_drafts_and_is_reproducible(width: int) -> None:
    """Drawn nodes are accepted, the same seed and trees give the same tokens again, and greedy is the same in both rules."""
    sampling = Sampling(temperature=1.0, seed=5)
    options = {"accept": Acceptance.HYBRID, "hybrid_width": width, "budget": 12, "ignore_end": True}
    async with local_stack() as stack:
        first, again = await generate(stack, sampling, **options), await generate(stack, sampling, **options)
        greedy, plain = await generate(stack, None, **options), await generate(stack, None, budget=0, ignore_end=True)
    assert first.token_ids == again.token_ids
    assert first.statistics.mean_acceptance_length > 1.5
    assert greedy.token_ids == plain.token_ids


async def test_9_a_replay_goes_on_with_the_same_history() -> None:
    """A session opened with half of a generation as output tokens continues it, penalties and log-probs included."""
    prompt = (5, 300, 301)
    sampling = replace(PENALISED, min_tokens=30)
    async with local_stack() as stack, stack.client() as client:
        whole = await client.generate(token_ids=prompt, sampling=sampling, max_tokens=40, num_log_probs=1)
        upstreams = stack.gateway.generations.serving.upstreams
        resolved = wire.sampling_from_message(sampling.to_message(), CoreSampling())
        resolved = replace(resolved, stop_token_ids=(MODEL.end_token_id,))
        for done in (1, 17):
            request = SessionRequest(
                (*prompt, *whole.token_ids[:done]),
                resolved,
                upstreams.target,
                "replay",
                num_log_probs=1,
                num_output_tokens=done,
            )
            async with upstreams.verify_session(request) as verifying:
                commit = await verifying.prefill()
                token_ids, log_probs = list(commit.token_ids), list(commit.log_probs)
                while len(token_ids) < 20:
                    lone_root = build_tree(token_ids[-1], Marginals.empty(), 0)
                    commit = await verifying.verify(lone_root)
                    token_ids += commit.token_ids
                    log_probs += commit.log_probs
            assert tuple(token_ids) == whole.token_ids[done : done + 20]
            assert [entry.log_prob for entry in log_probs] == [entry.log_prob for entry in whole.log_probs[done : done + 20]]
