"""Rounds of random sessions leave pages and memory as they were. `make soak-sessions` runs 20,000 of them, the suite fewer."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from draft_service.engine import DraftEngine, FeatureReader, Proposal
from draft_service.engines.causal_lm import CausalLMDrafter
from draft_service.engines.checkpoints import load_feature_drafter
from tests.engines.tiny_drafters import HIDDEN_SIZE, save_dflash, save_recurrent
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire.core.acceptance import accept
from treewire.core.sampling import Sampling
from treewire.core.simulated import SimulatedModel
from treewire.core.tree import Commit, DraftTree
from treewire.kv.pages import KvExhausted
from verify_service.engine import PrefillChunk, Scoring, TargetEngine
from verify_service.engines.simulated import SimulatedTarget
from verify_service.engines.transformers import TransformersTarget

NUM_ROUNDS = int(os.environ.get("TREEWIRE_SOAK_ROUNDS", "2000"))
KV_TOKENS = 1024
DRAFTER_KV_TOKENS = 512
MOST_SESSIONS = 6
LONGEST_SEQUENCE = 160
GROWTH_BYTES = 24 * 2**20  # what allocators keep beside; a page a round would be ten times that


class Counting(Protocol):
    """An engine that counts what it holds."""

    @property
    def num_sessions(self) -> int:
        """Open sessions."""

    @property
    def num_free_slots(self) -> int:
        """Free token positions."""


class Soaked(TargetEngine, Counting, Protocol):
    """A target that counts what it holds."""


class SoakedDrafter(DraftEngine, Counting, Protocol):
    """A drafter that counts what it holds."""


class Crowd:
    """Random sessions that come, draft at random, and go; most of them in common steps."""

    def __init__(self, engine: Soaked, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._lengths: dict[int, int] = {}
        self._roots: dict[int, int] = {}
        self._num_opened = 0

    def run(self, num_rounds: int) -> None:
        """Run until so many trees were scored, then let all sessions go."""
        scored = 0
        while scored < num_rounds:
            if len(self._lengths) < MOST_SESSIONS and (not self._lengths or self._rng.random() < 0.3):
                self._open()
            for session in [each for each in self._lengths if self._is_over(each)]:
                self._release(session)
            scored += self._score()
        for session in tuple(self._lengths):
            self._release(session)

    def _open(self) -> None:
        self._num_opened += 1
        prompt = tuple(self._rng.randrange(3, 6) for _ in range(self._rng.randrange(2, 40)))
        try:
            num_known = self._engine.open(self._num_opened, prompt, Sampling())
        except KvExhausted:
            return
        (posterior,) = self._engine.step([PrefillChunk(self._num_opened, prompt[num_known:], last=True)])
        self._lengths[self._num_opened], self._roots[self._num_opened] = len(prompt), posterior.token_ids[0]

    def _score(self) -> int:
        chosen = [session for session in self._lengths if self._rng.random() < 0.7]
        work = [Scoring(session, self._tree(self._roots[session])) for session in chosen]
        if not work:
            return 0
        try:
            posteriors = self._engine.step(work)
        except KvExhausted as error:
            self._release(error.session)
            return 0
        for item, posterior in zip(work, posteriors, strict=True):
            acceptance = accept(item.tree, posterior.token_ids)
            self._engine.keep(item.session, acceptance)
            self._roots[item.session] = acceptance.token_ids(item.tree)[-1]
            self._lengths[item.session] += len(acceptance.nodes)
        return len(work)

    def _tree(self, root: int) -> DraftTree:
        num_nodes = self._rng.randrange(9)
        token_ids = (root, *(self._rng.randrange(3, VOCABULARY_SIZE) for _ in range(num_nodes)))
        return DraftTree(token_ids, (-1, *(self._rng.randrange(node) for node in range(1, num_nodes + 1))))

    def _is_over(self, session: int) -> bool:
        return self._lengths[session] > LONGEST_SEQUENCE or self._rng.random() < 0.04

    def _release(self, session: int) -> None:
        self._engine.release(session)
        del self._lengths[session], self._roots[session]


class Drafted:
    """Random sessions of a drafter that come, are drafted for, and go; most of them in common steps. Some begin alike."""

    def __init__(self, engine: SoakedDrafter, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._texts: dict[int, list[int]] = {}
        self._paths: dict[int, list[int]] = {}
        self._num_opened = 0
        rows = np.random.default_rng(seed).standard_normal((VOCABULARY_SIZE, HIDDEN_SIZE))
        self._features = rows.astype(np.float32) if isinstance(engine, FeatureReader) else None

    def run(self, num_rounds: int) -> None:
        """Run until so many drafts were made, then let all sessions go."""
        drafted = 0
        while drafted < num_rounds:
            if len(self._texts) < MOST_SESSIONS and (not self._texts or self._rng.random() < 0.3):
                self._open()
            for session in [each for each in self._texts if self._is_over(each)]:
                self._release(session)
            drafted += self._draft()
        for session in tuple(self._texts):
            self._release(session)

    def _open(self) -> None:
        self._num_opened += 1
        prompt = [self._rng.randrange(3, 5) for _ in range(self._rng.randrange(2, 40))]
        try:
            self._engine.start(self._num_opened, prompt, Sampling())
        except KvExhausted:
            return
        self._texts[self._num_opened], self._paths[self._num_opened] = prompt, []
        if isinstance(self._engine, FeatureReader) and self._features is not None:
            self._engine.take_in(self._num_opened, self._features[prompt])

    def _draft(self) -> int:
        proposals = [self._proposal(session) for session in self._texts if self._rng.random() < 0.7]
        try:
            answers = self._engine.propose(proposals)
        except KvExhausted as error:
            self._release(error.session)
            return 0
        for proposal, marginals in zip(proposals, answers, strict=True):
            self._texts[proposal.session] += proposal.commit.token_ids
            self._paths[proposal.session] = marginals.token_ids[: marginals.num_depths, 0].tolist()
        return len(proposals)

    def _proposal(self, session: int) -> Proposal:
        """Some of what was guessed is committed, and another token."""
        text, path = self._texts[session], self._paths[session]
        new = (*path[: self._rng.randrange(len(path) + 1)], self._rng.randrange(3, VOCABULARY_SIZE))
        known = len(text) - 1 if path else len(text)
        features = None if self._features is None else self._features[[*text, *new][known:-1]]
        return Proposal(session, Commit(new, len(text) + len(new)), 4, 8, features, self._rng.random() < 0.5)

    def _is_over(self, session: int) -> bool:
        return len(self._texts[session]) > LONGEST_SEQUENCE or self._rng.random() < 0.04

    def _release(self, session: int) -> None:
        self._engine.release(session)
        del self._texts[session], self._paths[session]


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return save_tiny_model(tmp_path_factory.mktemp("soak"), "llama")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page_size", [1, 8])
@pytest.mark.parametrize("kind", ["simulated", "transformers"])
def test_pages_and_memory_are_at_the_baseline_after_the_rounds(kind: str, page_size: int, tiny_llama: Path) -> None:
    """Every page is free again, no session is left, and the process is as large as after the first rounds."""
    engine: Soaked
    if kind == "simulated":
        engine = SimulatedTarget(SimulatedModel(), max_tree_nodes=16, kv_tokens=KV_TOKENS, kv_page_size=page_size)
    else:
        engine = TransformersTarget.load(tiny_llama, max_tree_nodes=16, kv_tokens=KV_TOKENS, kv_page_size=page_size)
    crowd = Crowd(engine, page_size)
    crowd.run(max(200, NUM_ROUNDS // 20))
    before = resident_bytes()
    crowd.run(NUM_ROUNDS)
    assert engine.num_sessions == 0
    assert engine.num_free_slots == KV_TOKENS // page_size * page_size
    assert resident_bytes() - before < GROWTH_BYTES


def load_drafter(kind: str, page_size: int, folder: Path, target: Path) -> SoakedDrafter:
    """A tiny drafter of a kind, with a small memory."""
    sizes = {"kv_tokens": DRAFTER_KV_TOKENS, "kv_page_size": page_size}
    if kind == "causal_lm":
        return CausalLMDrafter.load(str(target), horizon=4, **sizes)  # type: ignore[arg-type]
    save = {"dflash": save_dflash, "recurrent": save_recurrent}[kind]
    return load_feature_drafter(save(folder / kind), target, **sizes)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "page_size"), [("causal_lm", 16), ("dflash", 16), ("recurrent", 1), ("recurrent", 16)])
def test_a_drafters_pages_and_memory_are_at_the_baseline_too(
    kind: str, page_size: int, tiny_llama: Path, tmp_path: Path
) -> None:
    """Sessions that are refused for want of memory among them: every page is free again, and the process has not grown."""
    engine = load_drafter(kind, page_size, tmp_path, tiny_llama)
    crowd = Drafted(engine, page_size)
    crowd.run(max(200, NUM_ROUNDS // 20))
    before = resident_bytes()
    crowd.run(NUM_ROUNDS)
    assert engine.num_sessions == 0
    assert engine.num_free_slots == DRAFTER_KV_TOKENS
    assert resident_bytes() - before < GROWTH_BYTES
