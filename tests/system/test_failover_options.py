"""A generation whose target dies in mid-stream, with everything on: drafters that read features, hybrid acceptance, penalties,
log-probs. What follows is what would have followed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_service.engine import DraftEngine
from draft_service.engines.checkpoints import load_feature_drafter
from tests.system.local_stack import MODEL, local_stack
from tests.system.replicated import replicated
from tests.system.test_features import SAVED, is_drafted, save_target
from tests.system.test_sampling import GREEDY_PENALISED, PENALISED, own_log_probs
from treewire import Sampling
from treewire.core.simulated import Prefix
from treewire.events import Chunk, Round
from treewire.types import Acceptance, Generation, Options
from verify_service.engine import Posterior, PrefillChunk, Scoring, TargetEngine
from verify_service.engines.simulated import SimulatedTarget
from verify_service.engines.transformers import TransformersTarget

PROMPT = tuple(range(300, 340))
NUM_TOKENS = 120
ROUNDS_BEFORE = 6
STEP_SECONDS = 0.01
HYBRID_TOP_K = 5


async def survived(targets: Sequence[TargetEngine], options: Options, **stack_options: Any) -> tuple[Generation, list[Round]]:
    """A generation whose target is lost after some rounds, and the rounds after the loss."""
    after: list[Round] = []
    async with replicated(targets, **stack_options) as stack, stack.client() as client:
        lost = None
        async with client.stream(**{**options, "include_rounds": True}) as stream:
            num_rounds = 0
            async for event in stream:
                num_rounds += isinstance(event, Round)
                if lost is not None and isinstance(event, Round):
                    after.append(event)
                if num_rounds == ROUNDS_BEFORE and lost is None:
                    lost = stack.busy
                    await stack.verify_running[lost].stop()
            generation = await stream.final()
        assert stack.failovers("lost") == 1
    return generation, after


def options_of(sampling: Sampling | None, prompt: Sequence[int] = PROMPT, **more: Any) -> Options:
    """A request that runs to its length."""
    return {"token_ids": prompt, "sampling": sampling, "ignore_end": True, "max_tokens": NUM_TOKENS, **more}  # type: ignore[typeddict-item]


def slow_targets() -> list[SimulatedTarget]:
    """Two targets slow enough for a loss in mid-stream."""
    return [SimulatedTarget(MODEL, step_seconds=STEP_SECONDS) for _ in range(2)]


async def undisturbed(options: Options, target: TargetEngine) -> Generation:
    """What one target gives by plain decoding."""
    async with local_stack(target, with_drafter=False) as stack, stack.client() as client:
        return await client.generate(**options)


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.8, seed=5)], ids=["greedy", "seeded"])
async def test_drafter_that_reads_features_follows_to_the_next_target(
    kind: str, sampling: Sampling | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens; and the drafter, fed with the features of both targets, is not lost and goes on drafting."""
    path, drafter_path = save_target(tmp_path), SAVED[kind](tmp_path / kind)
    options = options_of(sampling, range(5, 60), budget=6, max_tokens=60)
    expected = await undisturbed(options, TransformersTarget.load(path))
    targets = [TransformersTarget.load(path, feature_projection=drafter_path) for _ in range(2)]
    for target in targets:
        monkeypatch.setattr(target, "step", slowed(target.step))
    drafter: DraftEngine = load_feature_drafter(drafter_path, path)
    generation, _ = await survived(targets, options, drafters=[drafter], draft_timeout_seconds=30.0)
    assert generation.token_ids == expected.token_ids
    assert generation.text == expected.text
    assert is_drafted(generation)


def slowed(
    step: Callable[[Sequence[PrefillChunk | Scoring]], Sequence[Posterior]],
) -> Callable[[Sequence[PrefillChunk | Scoring]], Sequence[Posterior]]:
    """The step, which takes a while."""

    def slow_step(work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        time.sleep(STEP_SECONDS)
        return step(work)

    return slow_step


@pytest.mark.parametrize("sampling", [PENALISED, GREEDY_PENALISED], ids=["sampled", "greedy"])
async def test_penalties_and_log_probs_go_on_as_if_nothing_had_happened(sampling: Sampling) -> None:
    """What was generated before the loss still counts as output; every token has its log-prob and its likeliest, once."""
    options = options_of(sampling, num_log_probs=2)
    expected = await undisturbed(options, SimulatedTarget(MODEL))
    generation, after = await survived(slow_targets(), options)
    assert generation.token_ids == expected.token_ids
    assert generation.text == expected.text
    assert generation.log_probs == expected.log_probs
    assert sum(len(event.committed_token_ids) for event in after) > len(after)


async def test_greedy_hybrid_acceptance_gives_the_same_tokens() -> None:
    """At temperature 0 the rule does not matter, before and after a loss."""
    options = options_of(None, accept=Acceptance.HYBRID, num_log_probs=0)
    expected = await undisturbed(options, SimulatedTarget(MODEL))
    generation, _ = await survived(slow_targets(), options)
    assert generation.token_ids == expected.token_ids
    assert [entry.log_prob for entry in generation.log_probs] == pytest.approx(
        own_log_probs(PROMPT, generation.token_ids), abs=1e-4
    )


async def test_hybrid_acceptance_stays_a_sample_of_the_targets_law() -> None:
    """Its tokens depend on the trees, so others than without the loss may come. None is lost or twice, each is one that the
    target could choose after exactly those before it, and the new target drafts and accepts on."""
    sampling = Sampling(temperature=1.0, top_k=HYBRID_TOP_K, seed=9)
    options = options_of(sampling, accept=Acceptance.HYBRID, num_log_probs=0)
    chunks: list[int] = []
    async with replicated(slow_targets()) as stack, stack.client() as client, client.stream(**options) as stream:
        num_chunks = 0
        async for event in stream:
            if isinstance(event, Chunk):
                chunks.extend(event.token_ids)
                num_chunks += 1
                if num_chunks == ROUNDS_BEFORE:
                    await stack.verify_running[stack.busy].stop()
        generation = await stream.final()
        assert stack.failovers("lost") == 1
    assert tuple(chunks) == generation.token_ids
    assert len(generation.token_ids) == generation.statistics.output_tokens == NUM_TOKENS
    prefixes = [Prefix.of((*PROMPT, *generation.token_ids[:count])) for count in range(NUM_TOKENS)]
    likeliest = np.argsort(-MODEL.logits(prefixes), axis=1)[:, :HYBRID_TOP_K]
    assert all(token_id in row for token_id, row in zip(generation.token_ids, likeliest.tolist(), strict=True))
    assert [entry.log_prob for entry in generation.log_probs] == pytest.approx(
        own_log_probs(PROMPT, generation.token_ids), abs=1e-4
    )
    assert generation.statistics.mean_acceptance_length > 1.5
