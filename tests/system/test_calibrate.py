"""`treewire calibrate` against a running stack, and a gateway with what it found."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from tests.system.local_stack import local_stack
from treewire import Sampling
from treewire.cli import app

PROMPTS = ["tell me about trees", "once upon a time", "1 2 3 1 2 3"]


async def test_calibrated_weights_are_the_gateway_s_settings(tmp_path: Path) -> None:
    """What calibrate writes, a gateway reads; the tokens stay the same, and drafts go on being accepted."""
    prompts, found = tmp_path / "prompts.txt", tmp_path / "weights.toml"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    sampling = Sampling(temperature=1.0, seed=9)
    async with local_stack() as stack, stack.client() as client:
        arguments = ["calibrate", str(prompts), "--output", str(found), "--address", client.address, "--max-tokens", "48"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert result.exit_code == 0, result.output
        before = await client.generate(PROMPTS[0], sampling=sampling, max_tokens=64)
    weights = tomllib.loads(found.read_text(encoding="utf-8"))
    assert set(weights) == {"log_prob_weight", "noise_weight"}
    assert 0.1 < weights["noise_weight"] <= 10
    async with local_stack(**weights) as stack, stack.client() as client:
        after = await client.generate(PROMPTS[0], sampling=sampling, max_tokens=64)
    assert after.token_ids == before.token_ids
    assert after.statistics.mean_acceptance_length > 1.5


async def test_what_cannot_be_calibrated_is_told(tmp_path: Path) -> None:
    """Without drafts there are no choices: a failure in one line, and no file. Greedy temperatures are wrong usage."""
    prompts, found = tmp_path / "prompts.txt", tmp_path / "weights.toml"
    prompts.write_text("a\n", encoding="utf-8")
    async with local_stack(with_drafter=False) as stack:
        arguments = ["calibrate", str(prompts), "--output", str(found), "--address", stack.address, "--max-tokens", "8"]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        greedy = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--temperature", "0"])
    assert result.exit_code == 1
    assert "0 choices were recorded" in result.output
    assert greedy.exit_code == 2
    assert not found.exists()


async def test_a_noise_weight_of_zero_is_the_plain_tree() -> None:
    """The same tokens; trees that do not aim at the noise gain less."""
    sampling = Sampling(temperature=1.0, seed=12)
    gained = []
    tokens = []
    for noise_weight in (0.0, 0.5):
        async with local_stack(noise_weight=noise_weight) as stack, stack.client() as client:
            generations = await asyncio.gather(
                *(client.generate(prompt, sampling=sampling, max_tokens=64, ignore_end=True) for prompt in PROMPTS)
            )
        tokens.append([generation.token_ids for generation in generations])
        gained.append(sum(generation.statistics.rounds for generation in generations))
    assert tokens[0] == tokens[1]
    assert gained[0] > gained[1]
