"""Structured output of the real model: nested objects, enums and arrays, greedy and sampled."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.structures import MAX_TOKENS, SCHEMA, is_valid, prompts
from draft_service.engines.ngram import NgramDrafter
from gateway.tokenization import Tokenization
from tests.system.local_stack import local_stack
from treewire import Sampling
from treewire.weights import resolve
from verify_service.__main__ import prepare
from verify_service.settings import VerifySettings


@pytest.mark.model
@pytest.mark.timeout(1200)
async def test_answers_are_json_of_the_schema_and_are_accepted_no_less() -> None:
    """Four prompts at T = 0 and 1 (`python -m benchmarks.structures` has fifty), beside free ones of the same length."""
    tokenization = Tokenization.from_directory(resolve("smollm2-135m", quiet=True))
    target = prepare(VerifySettings(model="smollm2-135m", dtype="int8", threads=1)).load()
    async with local_stack(target, NgramDrafter(), tokenization=tokenization) as stack, stack.client() as client:
        samplings = [Sampling(temperature=temperature, seed=number) for number in range(2) for temperature in (0.0, 1.0)]
        asked = list(zip(prompts()[:4], samplings, strict=True))
        structured = await asyncio.gather(
            *(client.generate(each, sampling=how, max_tokens=MAX_TOKENS, json_schema=SCHEMA) for each, how in asked)
        )
        lengths = [each.output_tokens for each in structured]
        free = await asyncio.gather(
            *(
                client.generate(each, sampling=how, max_tokens=length, ignore_end=True)
                for (each, how), length in zip(asked, lengths, strict=True)
            )
        )
    assert all(is_valid(each.text) and each.finish_reason == "stop" for each in structured)
    tokens = sum(lengths) - len(lengths)
    assert tokens / sum(each.statistics.rounds for each in structured) >= tokens / sum(each.statistics.rounds for each in free)
