"""The real small model through three real servers: its tokens are those of plain decoding in transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_service.engines.ngram import NgramDrafter
from gateway.tokenization import Tokenization
from tests.system.local_stack import draft_server, gateway_server, verify_server
from treewire import AsyncClient, Sampling
from treewire.types import Generation
from treewire.weights import resolve
from verify_service.engines.transformers import TransformersTarget

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

MAX_TOKENS = 128
PROMPTS = [
    "What is the capital of France?",
    "Count from one to twenty in words.",
    "Write a haiku about the sea.",
    "List five fruits, then list them again in reverse order.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers, with a docstring.",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 times 3? Show the steps.",
    "Repeat the sentence 'the cat sat on the mat' four times.",
    "Who wrote Romeo and Juliet, and when?",
    "Describe a forest in autumn.",
    "Give three reasons to learn to swim.",
    "Write JSON with the keys name, age and city for two people.",
    "What does the word 'ephemeral' mean?",
    "Tell a very short story about a robot that finds a flower.",
    "How do I boil an egg? Number the steps.",
    "Name the planets of the solar system in order.",
    "Write an SQL query that selects all users older than 30.",
    "日本の首都はどこですか。",
    "Summarise: trees take in carbon dioxide and give off oxygen, which animals breathe.",
]
SEEDED = Sampling(temperature=1.0, seed=1234)


@dataclass(frozen=True)
class RealStack:
    """Gateways in front of one target: with n-gram trees, with n-gram chains, without a drafter, with one that will die."""

    trees: AsyncClient
    chains: AsyncClient
    undrafted: AsyncClient
    doomed: AsyncClient
    kill_drafter: asyncio.Event


@pytest.fixture(scope="module")
def model_path() -> Path:
    """The default model, converted."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def target(model_path: Path) -> TransformersTarget:
    """The target engine on the default model in float32."""
    return TransformersTarget.load(model_path, max_tree_nodes=65, kv_tokens=65536)


@asynccontextmanager
async def real_stack(target: TransformersTarget, model_path: Path) -> AsyncIterator[RealStack]:
    """Three kinds of real servers on loopback."""
    tokenization = Tokenization.from_directory(model_path)
    async with AsyncExitStack() as stack:
        verify, _ = await stack.enter_async_context(verify_server(target, max_step_tokens=4096))
        drafter, _ = await stack.enter_async_context(draft_server(NgramDrafter(width=16)))
        mortal, _ = await stack.enter_async_context(draft_server(NgramDrafter()))

        async def client(draft: str, width: int = 64) -> AsyncClient:
            gateway = await stack.enter_async_context(
                gateway_server(verify.address, draft, tokenization, width=width, verify_timeout_seconds=600.0)
            )
            return await stack.enter_async_context(AsyncClient(gateway.address, timeout_seconds=None))

        kill = asyncio.Event()

        async def stop_when_told() -> None:
            await kill.wait()
            await mortal.stop()

        assassin = asyncio.create_task(stop_when_told())
        stack.callback(assassin.cancel)
        yield RealStack(
            await client(drafter.address),
            await client(drafter.address, 1),
            await client(""),
            await client(mortal.address),
            kill,
        )


def plain_greedy(model_path: Path, prompts: Sequence[Sequence[int]], end_token_id: int) -> list[tuple[int, ...]]:
    """What transformers' own greedy decoding gives, in one left-padded batch."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.tensor([[end_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=end_token_id
    )
    return [_up_to_end(row[longest:].tolist(), end_token_id) for row in output]


def _up_to_end(token_ids: list[int], end_token_id: int) -> tuple[int, ...]:
    length = token_ids.index(end_token_id) + 1 if end_token_id in token_ids else len(token_ids)
    return tuple(token_ids[:length])


async def generate(
    client: AsyncClient, budget: int, sampling: Sampling | None = None, max_tokens: int = MAX_TOKENS
) -> list[Generation]:
    """All prompts at once."""
    tasks = [client.generate(prompt, budget=budget, sampling=sampling, max_tokens=max_tokens) for prompt in PROMPTS]
    return list(await asyncio.gather(*tasks))


async def generate_and_lose_the_drafter(stack: RealStack) -> list[Generation]:
    """All prompts at once, on a drafter that dies while they run."""
    running = asyncio.gather(*(stack.doomed.generate(prompt, budget=8, max_tokens=MAX_TOKENS) for prompt in PROMPTS))
    async with stack.doomed.stream(PROMPTS[1], budget=8, max_tokens=MAX_TOKENS) as watched:
        for _ in range(12):
            await anext(watched)
        stack.kill_drafter.set()
        await watched.final()
    return list(await running)


async def test_greedy_output_is_that_of_transformers(target: TransformersTarget, model_path: Path) -> None:
    """20 prompts x 128 tokens: undrafted, chains, trees of 8 and 64, and with the drafter killed in mid-stream."""
    tokenization = Tokenization.from_directory(model_path)
    prompts = [tokenization.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    expected = plain_greedy(model_path, prompts, tokenization.end_token_ids[0])
    async with real_stack(target, model_path) as stack:
        undrafted, chains, small, large, bereft = await asyncio.gather(
            generate(stack.undrafted, 0),
            generate(stack.chains, 8),
            generate(stack.trees, 8),
            generate(stack.trees, 64),
            generate_and_lose_the_drafter(stack),
        )
    for name, generations in {"undrafted": undrafted, "chain": chains, "8": small, "64": large, "bereft": bereft}.items():
        assert [generation.token_ids for generation in generations] == expected, name
    assert sum(generation.statistics.accepted_tokens for generation in large) > 100
    assert sum(generation.statistics.accepted_tokens for generation in chains) > 100
    assert sum(generation.statistics.draft_tokens for generation in bereft) > 0
    assert sum(generation.statistics.lone_roots for generation in bereft) > 0
    assert target.num_sessions == 0


async def test_seeded_output_does_not_depend_on_drafter_budget_or_batch(target: TransformersTarget, model_path: Path) -> None:
    """Temperature 1 with a seed: trees, chains and no drafter agree; one prompt alone gives what it gives in the batch."""
    async with real_stack(target, model_path) as stack:
        alone = [await stack.undrafted.generate(prompt, sampling=SEEDED, max_tokens=32) for prompt in PROMPTS[:3]]
        undrafted, chains, trees = await asyncio.gather(
            generate(stack.undrafted, 0, SEEDED, 48),
            generate(stack.chains, 8, SEEDED, 48),
            generate(stack.trees, 16, SEEDED, 48),
        )
    expected = [generation.token_ids for generation in undrafted]
    assert [generation.token_ids for generation in chains] == expected
    assert [generation.token_ids for generation in trees] == expected
    assert [generation.token_ids for generation in alone] == [token_ids[:32] for token_ids in expected[:3]]
    assert sum(generation.statistics.accepted_tokens for generation in trees) > 0


async def test_prompt_is_encoded_once(target: TransformersTarget, model_path: Path) -> None:
    """The target computes the prompt's positions and the nodes of every tree, and nothing else; a second time not even those
    of the prompt, but for its last."""
    text = "Oak, ash, elm, oak, ash, elm, oak, ash,"  # no chat template: no earlier test has computed its beginning
    async with real_stack(target, model_path) as stack:
        for num_known in (0, None):
            before = target.positions_computed
            generation = await stack.trees.generate(text=text, budget=8, max_tokens=64, ignore_end=True)
            computed = target.positions_computed - before
            nodes = generation.statistics.draft_tokens + generation.statistics.rounds
            known = generation.prompt_tokens - 1 if num_known is None else num_known
            assert computed == generation.prompt_tokens - known + nodes
