"""`treewire calibrate` against a running stack, and a gateway with what it found."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draft_service.engines.checkpoints import load_feature_drafter
from tests.engines.tiny_drafters import save_recurrent
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import local_stack
from treewire import Sampling, wire
from treewire.checkpoint import read_branch_weights, write_branch_weights
from treewire.cli import app
from treewire.core.build import USUAL_WEIGHTS, BranchWeights
from treewire.events import Round
from treewire.v1 import draft_pb2
from verify_service.engines.transformers import TransformersTarget

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


async def test_weights_are_left_beside_a_checkpoint(tmp_path: Path) -> None:
    """`--write-beside` puts them where the drafter reads them. Somewhere they must go, but not where there is no drafter."""
    prompts, drafter = tmp_path / "prompts.txt", save_recurrent(tmp_path / "drafter")
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    async with local_stack() as stack:
        arguments = ["calibrate", str(prompts), "--address", stack.address, "--max-tokens", "24"]
        nowhere = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        elsewhere = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--write-beside", str(tmp_path)])
        result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--write-beside", str(drafter)])
    assert nowhere.exit_code == elsewhere.exit_code == 2
    assert "--output or --write-beside is needed" in nowhere.output
    assert "config.json" in elsewhere.output
    assert result.exit_code == 0, result.output
    weights = read_branch_weights(drafter)
    assert weights is not None
    printed = tomllib.loads(result.stdout)
    assert (weights.log_prob, weights.noise) == (printed["log_prob_weight"], printed["noise_weight"])


async def test_the_gateway_builds_trees_by_the_weights_beside_the_drafter(tmp_path: Path) -> None:
    """A calibrated checkpoint is all it takes: trees are those of a gateway that was told these weights, the tokens those of
    one that was told nothing. What the gateway is told comes first."""
    weights = BranchWeights(0.2, 3.0)
    target = save_tiny_model(tmp_path / "target", "llama", eos_token_id=None)
    plain, fitted = save_recurrent(tmp_path / "plain"), save_recurrent(tmp_path / "fitted")
    write_branch_weights(fitted, weights)
    told = {"log_prob_weight": weights.log_prob, "noise_weight": weights.noise}
    usual = await _rounds(target, plain, USUAL_WEIGHTS)
    by_drafter = await _rounds(target, fitted, weights)
    by_both = await _rounds(target, fitted, weights, **told)
    await _rounds(target, fitted, BranchWeights(0.2, 0.1), noise_weight=0.1)
    assert [event.token_ids for event in by_drafter] == [event.token_ids for event in by_both]
    assert [event.token_ids for event in by_drafter] != [event.token_ids for event in usual]
    assert _tokens(by_drafter) == _tokens(usual)


async def _rounds(target: Path, drafter: Path, expected: BranchWeights, **settings: float) -> list[Round]:
    """The rounds of one generation, whose gateway uses the expected weights."""
    engines = TransformersTarget.load(target, feature_projection=drafter), load_feature_drafter(drafter, target)
    async with local_stack(*engines, **settings) as stack, stack.client() as client:
        assert stack.gateway.generations.serving.branch_weights == expected
        sampling = Sampling(temperature=1.0, seed=5)
        wanted = {"token_ids": range(5, 30), "ignore_end": True, "max_tokens": 30, "budget": 8, "include_rounds": True}
        async with client.stream(sampling=sampling, **wanted) as stream:  # type: ignore[arg-type]
            return [event async for event in stream if isinstance(event, Round)]


def _tokens(rounds: list[Round]) -> list[int]:
    return [token_id for event in rounds for token_id in event.committed_token_ids]


async def test_a_drafter_with_impossible_weights_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The generation completes without drafts, and the log says why."""
    wrong = draft_pb2.BranchWeights(log_prob=0.0, noise=1.0)
    monkeypatch.setattr(wire, "branch_weights_to_message", lambda weights: wrong)
    async with local_stack() as stack, stack.client() as client:
        generation = await client.generate("a b c", max_tokens=12, ignore_end=True)
    assert generation.statistics.lone_roots == generation.statistics.rounds
    assert "branch_weights: log_prob_weight is 0.0, it must be above 0 and at most 10" in caplog.text


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
