"""SmolLM2 through three real servers with SGLang as the target: plain decoding's tokens, greedy and seeded.

Attention is torch's SDPA under SGLang's interface here: Triton interpreted takes 10 s and more for one forward of this model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_service.engines.ngram import NgramDrafter
from gateway.tokenization import Tokenization
from tests.engines.target_contract import GREEDY
from tests.sglang.served import Served, served
from tests.system.local_stack import draft_server, gateway_server, verify_server
from tests.system.test_real_model import PROMPTS
from treewire import AsyncClient
from treewire import Sampling as UserSampling
from treewire.core.noise import noise_row
from treewire.core.processing import choose, process
from treewire.core.sampling import Sampling
from treewire.weights import resolve

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_TOKENS = 32
BUDGET = 8
SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 77}
NUM_SEEDED = 4


@pytest.fixture(scope="module")
def model_path() -> Path:
    """The default model, converted."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    """The same as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def smollm(model_path: Path) -> Iterator[Served]:
    """SGLang with SmolLM2."""
    sizes = {"max_tree_nodes": 1 + BUDGET, "max_context": 512, "max_total_tokens": 8192, "max_sessions": 24}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TREEWIRE_TEST_ATTENTION", "sdpa")
        with served(model_path, **sizes) as started:
            yield started


@torch.inference_mode()
def plain_decoding(model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int]) -> tuple[int, ...]:
    """What transformers' logits and the core's chain give, token by token, without any tree."""
    text, cache, fresh = list(prompt), None, list(prompt)
    while (len(text) < len(prompt) + NUM_TOKENS and text[-1] not in ends) or len(text) == len(prompt):
        output = model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        row = process(output.logits[0, -1:].numpy(), sampling)
        noise = None if sampling.is_greedy else noise_row(sampling.seed, len(text), row.shape[1])[None]
        fresh = [int(choose(row, noise)[0])]
        text += fresh
    return tuple(text[len(prompt) :])


async def generated(
    served_target: Served, model_path: Path, prompts: Sequence[str], sampling: UserSampling
) -> list[tuple[int, ...]]:
    """All prompts at once through client, gateway, n-gram drafter and the verify service on SGLang."""
    tokenization = Tokenization.from_directory(model_path)
    engine = served_target.engine()
    async with verify_server(engine, max_sessions=24) as (verify, _), draft_server(NgramDrafter(width=16)) as (drafter, _):
        front = gateway_server(verify.address, drafter.address, tokenization, verify_timeout_seconds=600.0)
        async with front as running, AsyncClient(running.address) as client:
            answers = await asyncio.gather(
                *(client.generate(prompt, budget=BUDGET, sampling=sampling, max_tokens=NUM_TOKENS) for prompt in prompts)
            )
    assert sum(answer.statistics.accepted_tokens for answer in answers) > 0
    assert engine.num_sessions == 0
    return [answer.token_ids for answer in answers]


async def test_greedy_output_is_that_of_plain_decoding(smollm: Served, model: PreTrainedModel, model_path: Path) -> None:
    """20 prompts x 32 tokens with trees of 8: the tokens of transformers' greedy decoding."""
    tokenization = Tokenization.from_directory(model_path)
    expected = [
        plain_decoding(
            model, tokenization.encode_chat([{"role": "user", "content": prompt}]), GREEDY, tokenization.end_token_ids
        )
        for prompt in PROMPTS
    ]
    assert await generated(smollm, model_path, PROMPTS, UserSampling(temperature=0.0)) == expected


async def test_seeded_output_is_that_of_plain_decoding(smollm: Served, model: PreTrainedModel, model_path: Path) -> None:
    """With a seed: the tokens of transformers' logits, the core's chain and the core's noise."""
    tokenization = Tokenization.from_directory(model_path)
    prompts = PROMPTS[:NUM_SEEDED]
    expected = [
        plain_decoding(
            model,
            tokenization.encode_chat([{"role": "user", "content": prompt}]),
            Sampling(**SEEDED),
            tokenization.end_token_ids,
        )
        for prompt in prompts
    ]
    assert await generated(smollm, model_path, prompts, UserSampling(**SEEDED)) == expected
