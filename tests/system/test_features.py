"""Drafters that read the target's hidden states: their features cross while the prefill runs, once, and change no token."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import gateway.assembly
from draft_service.engine import Proposal, SessionId
from draft_service.engines.checkpoints import load_feature_drafter
from tests.engines.tiny_drafters import save_dflash, save_recurrent
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import draft_server, local_stack
from treewire import Sampling
from treewire.core.build import build_tree
from treewire.core.tree import Marginals
from treewire.events import Round
from treewire.runtime.channel import open_channel
from treewire.runtime.tracing import OpenTelemetryTracing
from treewire.simulation.recorder import Recorder
from treewire.types import Acceptance, Generation, Options
from verify_service.engine import Posterior, PrefillChunk, Scoring
from verify_service.engines.transformers import TransformersTarget

PROMPT = tuple(range(5, 60))
SAMPLINGS = [None, Sampling(temperature=1.0, seed=7), Sampling(temperature=0.6, top_k=20, top_p=0.9, seed=8)]
SAVED = {"dflash": save_dflash, "recurrent": save_recurrent}
SLOW_STEP_SECONDS = 0.06
LONG = tuple(5 + number * 7 % 90 for number in range(4000))


def save_target(folder: Path, **shape: Any) -> Path:
    """A tiny target whose text never ends by itself."""
    return save_tiny_model(folder / "target", "llama", eos_token_id=None, **shape)


def options(prompt: Sequence[int] = PROMPT, **more: Any) -> Options:
    """A request for tokens alone."""
    return {"token_ids": prompt, "ignore_end": True, **more}  # type: ignore[typeddict-item]


@pytest.mark.parametrize("kind", SAVED)
async def test_same_tokens_with_every_budget(kind: str, tmp_path: Path) -> None:
    """Greedy and seeded, alone and together, the output is the target's own, token by token."""
    path, drafter_path = save_target(tmp_path), SAVED[kind](tmp_path / kind)
    async with local_stack(TransformersTarget.load(path), with_drafter=False) as stack, stack.client() as client:
        plain = [await client.generate(**options(sampling=sampling, max_tokens=40)) for sampling in SAMPLINGS]
    target = TransformersTarget.load(path, feature_projection=drafter_path)
    async with local_stack(target, load_feature_drafter(drafter_path, path)) as stack, stack.client() as client:
        for budget in (0, 1, 4, 16, 64):
            tasks = [client.generate(**options(sampling=each, max_tokens=40, budget=budget)) for each in SAMPLINGS]
            generations = await asyncio.gather(*tasks)
            assert [each.token_ids for each in generations] == [each.token_ids for each in plain]
            assert all(is_drafted(each) == (budget > 0) for each in generations)


async def test_same_tokens_with_conditional_rows(tmp_path: Path) -> None:
    """Trees whose nodes have children of their own: greedy and seeded, chains and trees of every budget, the same tokens; and
    most trees are not those of marginals by depth."""
    path, drafter_path = save_target(tmp_path), save_recurrent(tmp_path / "drafter")
    async with local_stack(TransformersTarget.load(path), with_drafter=False) as stack, stack.client() as client:
        plain = [await client.generate(**options(sampling=sampling, max_tokens=40)) for sampling in SAMPLINGS]
    drafter = _Watched(load_feature_drafter(drafter_path, path, beam=3))
    async with local_stack(_target(path, drafter_path), drafter) as stack, stack.client() as client:  # type: ignore[arg-type]
        for more in ({"budget": 0}, {"budget": 4, "width": 1}, {"budget": 1}, {"budget": 8}, {"budget": 16}, {"budget": 64}):
            tasks = [client.generate(**options(sampling=each, max_tokens=40, **more)) for each in SAMPLINGS]
            generations = await asyncio.gather(*tasks)
            assert [each.token_ids for each in generations] == [each.token_ids for each in plain]
            assert all(is_drafted(each) == (more["budget"] > 0) for each in generations)
        async with client.stream(**options(max_tokens=40, budget=16, include_rounds=True)) as stream:
            rounds = [event async for event in stream if isinstance(event, Round)]
    by_depth = 0
    for event in rounds:
        marginals = drafter.marginals[event.length - len(event.committed_token_ids)]
        flat = Marginals(marginals.token_ids[: marginals.num_depths], marginals.log_probs[: marginals.num_depths])
        by_depth += build_tree(event.token_ids[0], flat, 16).tree.token_ids == event.token_ids
        assert len(marginals.prefixes) == 2 * (marginals.num_depths - 1)
    assert by_depth < len(rounds) / 2


async def test_hybrid_generations_ask_for_no_conditional_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their trees are of marginals by depth, since a drawn token must not decide a shape; a drafter that sends conditional
    rows all the same is lost, and the generation completes."""
    path, drafter_path = save_target(tmp_path), save_recurrent(tmp_path / "drafter")
    sampling, more = Sampling(temperature=1.0, seed=7), {"accept": Acceptance.HYBRID, "max_tokens": 20, "budget": 8}
    drafter = _Watched(load_feature_drafter(drafter_path, path, beam=3))
    async with local_stack(_target(path, drafter_path), drafter) as stack, stack.client() as client:  # type: ignore[arg-type]
        hybrid = await client.generate(**options(sampling=sampling, **more))
    assert is_drafted(hybrid)
    assert not any(marginals.prefixes for marginals in drafter.marginals.values())
    assert "drafter lost" not in caplog.text
    eager = _Eager(load_feature_drafter(drafter_path, path, beam=3))
    async with local_stack(_target(path, drafter_path), eager) as stack, stack.client() as client:  # type: ignore[arg-type]
        undrafted = await client.generate(**options(sampling=sampling, **more))
    assert undrafted.statistics.lone_roots == undrafted.statistics.rounds
    assert undrafted.output_tokens == 20
    assert "prefixes, at most 0 were to come" in caplog.text


async def test_recordings_ask_for_no_conditional_rows(tmp_path: Path) -> None:
    """They keep a row for each depth; the target's own tokens are those that come without a drafter."""
    path, drafter_path = save_target(tmp_path), save_recurrent(tmp_path / "drafter")
    drafter = load_feature_drafter(drafter_path, path, beam=3)
    async with local_stack(_target(path, drafter_path), drafter) as stack, stack.client() as client:
        plain = await client.generate(**options(max_tokens=12, budget=0))
        assert stack.draft_running is not None
        async with open_channel(stack.verify_running.address) as verify, open_channel(stack.draft_running.address) as draft:
            observed = await Recorder(verify, draft, max_tokens=12).record(PROMPT)
    assert observed.token_ids == plain.token_ids
    assert len(observed.proposals) == 11
    assert not any(marginals.prefixes for marginals in observed.proposals)


def is_drafted(generation: Generation) -> bool:
    """True if every round had a tree, but perhaps the last, which may have room for one token alone."""
    return generation.statistics.lone_roots <= 1


@pytest.mark.parametrize("kind", SAVED)
async def test_every_position_is_computed_once(kind: str, tmp_path: Path) -> None:
    """The drafter's prefill happens once; each round then computes the newly committed positions, never one again."""
    path, drafter_path = save_target(tmp_path), SAVED[kind](tmp_path / kind)
    drafter = load_feature_drafter(drafter_path, path)
    target = TransformersTarget.load(path, feature_projection=drafter_path)
    async with local_stack(target, drafter, max_running=1) as stack, stack.client() as client:
        async with client.stream(**options(max_tokens=30, include_rounds=True)) as stream:
            commits = [len(event.committed_token_ids) async for event in stream if isinstance(event, Round)]
    assert drafter.positions_computed == len(PROMPT) + sum(commits[:-1])


async def test_features_cross_while_the_prefill_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter takes in a prompt's first chunks before the target has computed its last one, and the trace shows it.

    The target waits with its last chunk until then: if features came only after the prefill, the test would fail.
    """
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(gateway.assembly, "open_tracing", lambda endpoint: OpenTelemetryTracing(exporter))
    path, drafter_path = save_target(tmp_path, max_position_embeddings=512), save_dflash(tmp_path / "drafter")
    drafter = _Watched(load_feature_drafter(drafter_path, path))
    target = _Patient(TransformersTarget.load(path, feature_projection=drafter_path), drafter.has_taken_in)
    async with (
        local_stack(target, drafter, verify={"prefill_chunk_tokens": 32}) as stack,  # type: ignore[arg-type]
        stack.client() as client,
    ):
        await client.generate(**options(tuple(LONG[:200]), max_tokens=4))
    assert target.was_overtaken
    spans = exporter.get_finished_spans()
    (prefill,) = [span for span in spans if span.name == "prefill"]
    chunks = [span for span in spans if span.name == "features"]
    assert len(chunks) > 1
    assert prefill.start_time is not None
    assert prefill.end_time is not None
    assert any(prefill.start_time < span.start_time < prefill.end_time for span in chunks if span.start_time)


async def test_long_prompt_stays_within_message_limits(tmp_path: Path) -> None:
    """4,000 tokens of features of a wide target, 16 MB, cross a stack whose largest message has 2 MiB."""
    shape = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 64}
    path = save_target(tmp_path, max_position_embeddings=4096, **shape)
    drafter_path = save_dflash(tmp_path / "drafter", hidden_size=1024, max_position_embeddings=4096)
    limits = {"max_message_bytes": 2**21}
    drafter = load_feature_drafter(drafter_path, path)
    target = TransformersTarget.load(path, feature_projection=drafter_path)
    async with local_stack(target, drafter, verify=limits, draft=limits, **limits) as stack, stack.client() as client:
        generation = await client.generate(**options(LONG, max_tokens=8))
    assert len(generation.token_ids) == 8
    assert is_drafted(generation)
    assert drafter.positions_computed >= len(LONG)


async def test_drafter_of_another_projection_is_refused_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The generation completes with lone roots, and the log says what did not fit."""
    path = save_target(tmp_path)
    ours, theirs = save_dflash(tmp_path / "ours", seed=1), save_dflash(tmp_path / "theirs", seed=2)
    drafter, target = load_feature_drafter(ours, path), TransformersTarget.load(path, feature_projection=theirs)
    async with local_stack(target, drafter) as stack, stack.client() as client:
        generation = await client.generate(**options(max_tokens=12))
    assert len(generation.token_ids) == 12
    assert generation.statistics.lone_roots == generation.statistics.rounds
    (loss,) = [line for line in caplog.text.splitlines() if "drafter lost" in line]
    assert drafter.drafter.feature_projection_hash in loss
    assert target.target.feature_projection_hash in loss


async def test_target_without_features_refuses_the_drafter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A verify service that was started without the projection: plain decoding, and the log says what to do."""
    path = save_target(tmp_path)
    drafter = load_feature_drafter(save_dflash(tmp_path / "drafter"), path)
    async with local_stack(TransformersTarget.load(path), drafter) as stack, stack.client() as client:
        generation = await client.generate(**options(max_tokens=12))
    assert generation.statistics.lone_roots == generation.statistics.rounds
    assert "without this drafter's feature projection" in caplog.text


@pytest.mark.parametrize("kind", SAVED)
async def test_drafter_that_comes_back_gets_the_features_of_the_whole_prefix(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new drafter in mid-stream is given what the lost one had, and proposes what the lost one would have proposed."""
    path, drafter_path = save_target(tmp_path), SAVED[kind](tmp_path / kind)
    undisturbed = _Watched(load_feature_drafter(drafter_path, path))
    async with local_stack(_target(path, drafter_path), undisturbed) as stack, stack.client() as client:  # type: ignore[arg-type]
        expected = await client.generate(**options(max_tokens=100))
    first, second = (_Watched(load_feature_drafter(drafter_path, path)) for _ in range(2))
    async with AsyncExitStack() as lifetime:
        target = _target(path, drafter_path)
        step = target.step

        def slow_step(work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
            time.sleep(SLOW_STEP_SECONDS)  # so that the generation lasts until the gateway has found the new drafter
            return step(work)

        monkeypatch.setattr(target, "step", slow_step)
        stack = await lifetime.enter_async_context(local_stack(target, first))  # type: ignore[arg-type]
        client = await lifetime.enter_async_context(stack.client())
        assert stack.draft_running is not None
        stream = await lifetime.enter_async_context(client.stream(**options(max_tokens=100, include_rounds=True)))
        num_rounds = 0
        async for event in stream:
            num_rounds += isinstance(event, Round)
            if num_rounds == 5 and not second.is_served:
                await stack.draft_running.stop()
                second.is_served = True
                await lifetime.enter_async_context(draft_server(second, stack.draft_running.address))  # type: ignore[arg-type]
        generation = await stream.final()
    assert generation.token_ids == expected.token_ids
    assert second.marginals
    for length, marginals in second.marginals.items():
        if length in undisturbed.marginals:
            np.testing.assert_allclose(marginals.log_probs, undisturbed.marginals[length].log_probs, atol=1e-3)
    assert set(second.marginals) & set(undisturbed.marginals)


async def test_drafter_too_slow_for_the_gateways_memory_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that takes in nothing while the gateway keeps half a prompt's features is lost; the tokens stay the target's."""
    path = save_target(tmp_path, max_position_embeddings=8192)
    drafter_path = save_dflash(tmp_path / "drafter", max_position_embeddings=8192)
    async with local_stack(TransformersTarget.load(path), with_drafter=False) as stack, stack.client() as client:
        expected = await client.generate(**options(LONG * 2, max_tokens=12))
    slow = _Watched(load_feature_drafter(drafter_path, path))
    slow.gate.clear()
    try:
        async with (
            local_stack(_target(path, drafter_path), slow, feature_bytes=2**20) as stack,  # type: ignore[arg-type]
            stack.client() as client,
        ):
            generation = await client.generate(**options(LONG * 2, max_tokens=12))
            slow.gate.set()
    finally:
        slow.gate.set()
    assert generation.token_ids == expected.token_ids
    assert generation.statistics.lone_roots == generation.statistics.rounds
    assert "drafter lost" in caplog.text


def _target(path: Path, drafter_path: Path) -> TransformersTarget:
    return TransformersTarget.load(path, feature_projection=drafter_path)


class _Watched:
    """A drafter whose proposals are kept by the length of the sequence, and which takes in features while `gate` is open."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.marginals: dict[int, Marginals] = {}
        self.has_taken_in = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.is_served = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def take_in(self, session: SessionId, features: NDArray[np.float32]) -> None:
        self.gate.wait(30.0)
        self._inner.take_in(session, features)
        self.has_taken_in.set()

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        answers: Sequence[Marginals] = self._inner.propose(proposals)
        self.marginals.update({item.commit.length: answer for item, answer in zip(proposals, answers, strict=True)})
        return answers


class _Patient:
    """A target that computes a long prompt's last chunk once the drafter has taken something in, or gives up after 20 s."""

    def __init__(self, inner: TransformersTarget, signal: threading.Event) -> None:
        self._inner = inner
        self._signal = signal
        self._num_chunks = 0
        self.was_overtaken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        for item in work:
            if isinstance(item, PrefillChunk) and item.session:
                self._num_chunks += 1
                if item.last and self._num_chunks > 1:
                    self.was_overtaken = self._signal.wait(20.0)
        return self._inner.step(work)


class _Eager:
    """A drafter that answers with conditional rows to whoever asks, wanted or not."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, proposals: Sequence[Proposal]) -> Sequence[Marginals]:
        answers: Sequence[Marginals] = self._inner.propose([replace(item, takes_conditional=True) for item in proposals])
        return answers
