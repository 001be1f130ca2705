"""Drafters with paged keys and values draft as from one dense sequence, share only what is equal, and lose no page."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from draft_service.engine import Proposal
from draft_service.engines.causal_lm import CausalLMDrafter
from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.dflash.model import BlockIngestion, DFlashCache, draft_blocks
from draft_service.engines.feature_drafter import FeatureDrafter
from draft_service.engines.recurrent.model import DraftCache, Ingestion, draft
from draft_service.step import Answer, Step
from tests.engines.tiny_drafters import HIDDEN_SIZE, save_dflash, save_recurrent
from tests.engines.tiny_models import save_tiny_model
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals
from treewire.errors import Overloaded
from treewire.kv.pages import KvExhausted, PagedKv

KV_TOKENS, LONGEST_TEXT, HORIZON, WIDTH, BEAM = 112, 60, 4, 8, 3
TOLERANCE = 1e-4

Features = NDArray[np.float32]
tokens = st.lists(st.integers(5, 6), min_size=1, max_size=20).map(tuple)  # two tokens only: prefixes meet
commits = st.lists(st.integers(5, 6), min_size=1, max_size=4).map(tuple)


@cache
def folder() -> Path:
    """A tiny model and drafters for it, on disk as long as the tests run."""
    kept = tempfile.TemporaryDirectory(prefix="treewire-drafters-")
    path = Path(kept.name)
    save_tiny_model(path / "target", "llama")
    save_dflash(path / "dflash")
    save_recurrent(path / "recurrent")
    _kept.append(kept)
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []


@cache
def loaded(kind: str) -> Any:
    """A feature drafter with its network, or the causal language model."""
    if kind == "causal_lm":
        return AutoModelForCausalLM.from_pretrained(folder() / "target", dtype=torch.float32).eval()
    beam = BEAM if kind == "recurrent" else None
    return load_feature_drafter(
        folder() / kind, folder() / "target", horizon=HORIZON, beam=beam, dtype="float32", kv_tokens=128
    )


def fresh(kind: str, page_size: int, kv_tokens: int = KV_TOKENS) -> FeatureDrafter | CausalLMDrafter:
    """An engine without sessions and with an empty memory."""
    if kind == "causal_lm":
        return CausalLMDrafter(loaded(kind), "tiny", HORIZON, WIDTH, kv_tokens=kv_tokens, kv_page_size=page_size)
    return FeatureDrafter(loaded(kind)._network, loaded(kind).drafter, PagedKv(kv_tokens, page_size))


def features_of(target: int, text: Sequence[int], first: int = 0) -> Features:
    """What a target makes of a text from a position on: a function of the target and the text up to each position."""
    rows = [np.random.default_rng([target, *text[: stop + 1]]).standard_normal(HIDDEN_SIZE) for stop in range(first, len(text))]
    return np.array(rows, np.float32).reshape(-1, HIDDEN_SIZE)


def check_recurrent(session: _Session, marginals: Marginals) -> None:
    """Rows and conditional rows are those of the beam search over one dense sequence."""
    model = loaded("recurrent")._network._model
    preceding = torch.from_numpy(np.vstack([np.zeros((1, HIDDEN_SIZE), np.float32), session.features()]))
    ingestion = Ingestion(DraftCache(model.config), torch.tensor(session.text), preceding)
    beam = BEAM if session.takes_conditional else 1
    (drafted,) = draft(model, [ingestion], horizon=HORIZON, width=WIDTH, beam=beam)
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(drafted.token_ids[1:], drafted.parents[1:], strict=True):
        paths.append((*paths[parent], token_id))
    expected = dict(zip(paths, drafted.child_log_probs.numpy(), strict=True))
    best = {len(path): path for path in reversed(paths)}
    rows = [best[depth] for depth in range(HORIZON)] + list(marginals.prefixes)
    assert len(rows) == len(expected)
    for path, log_probs in zip(rows, marginals.log_probs, strict=True):
        np.testing.assert_allclose(log_probs, expected[path], atol=TOLERANCE)


def check_dflash(session: _Session, marginals: Marginals) -> None:
    """Rows are those of a block over one dense sequence."""
    model = loaded("dflash")._network._model
    ingestion = BlockIngestion(DFlashCache(model.config), torch.from_numpy(session.features()), session.text[-1])
    check_rows(marginals, draft_blocks(model, [ingestion])[0, :HORIZON].log_softmax(-1))


@torch.inference_mode()
def check_causal_lm(session: _Session, marginals: Marginals) -> None:
    """Rows are those of a plain forward on the text and the best tokens of the rows before."""
    path = [*session.text, *marginals.token_ids[:-1, 0].tolist()]
    logits = loaded("causal_lm")(torch.tensor([path])).logits[0, len(session.text) - 1 :]
    check_rows(marginals, logits.log_softmax(-1))


def check_rows(marginals: Marginals, expected: torch.Tensor) -> None:
    """The best tokens of each row, with these log-probs."""
    best = expected.topk(marginals.width)
    np.testing.assert_allclose(marginals.log_probs, best.values.numpy(), atol=TOLERANCE)
    said = expected.numpy()[np.arange(len(expected))[:, np.newaxis], marginals.token_ids]
    np.testing.assert_allclose(marginals.log_probs, said, atol=TOLERANCE)


CHECKS = {"recurrent": check_recurrent, "dflash": check_dflash, "causal_lm": check_causal_lm}


@dataclass(eq=False)
class _Session:
    """What a session was told. `target` is whose features it is given; `best_path` is what was guessed last."""

    id: int
    target: int
    text: list[int]
    takes_conditional: bool = False
    num_features: int = 0
    best_path: list[int] = field(default_factory=list)

    def features(self) -> Features:
        """Those of all positions but the last, which has none yet."""
        return features_of(self.target, self.text[:-1])


class DraftedSessions(RuleBasedStateMachine):
    """Random sessions of one drafter over a small memory, of two targets whose features differ."""

    kind, page_size = "recurrent", 1
    sessions: Bundle[_Session] = Bundle("sessions")

    @initialize()
    def make(self) -> None:
        """An empty memory."""
        self.engine = fresh(self.kind, self.page_size)
        self.open_sessions: list[_Session] = []
        self.num_opened = 0

    @rule(target=sessions, prompt=tokens, source=st.integers(0, 1))
    def open(self, prompt: tuple[int, ...], source: int) -> Any:
        """Start a session if there is room."""
        return self._open(source, prompt)

    @rule(target=sessions, session=sessions, more=tokens)
    def fork(self, session: _Session, more: tuple[int, ...]) -> Any:
        """Start a session that goes on with another's text."""
        return self._open(session.target, (*session.text, *more))

    @rule(session=sessions, size=st.integers(1, 24))
    def feed(self, session: _Session, size: int) -> None:
        """Give the next features ahead of a proposal."""
        stop = min(session.num_features + size, len(session.text))
        if isinstance(self.engine, CausalLMDrafter) or stop == session.num_features:
            return
        given = features_of(session.target, session.text[:stop], session.num_features)
        with self._unchanged_if_refused():
            self.engine.take_in(session.id, given)
            session.num_features = stop

    @rule(chosen=st.lists(sessions, min_size=1, max_size=3, unique_by=id), news=st.lists(commits, min_size=3, max_size=3))
    def draft(self, chosen: list[_Session], news: list[tuple[int, ...]]) -> None:
        """Commit any tokens, and draft for several sessions together."""
        self._draft(dict(zip(chosen, news, strict=False)), takes_conditional=bool(news[0][0] % 2))

    @rule(session=sessions, length=st.integers(1, HORIZON), bonus=st.integers(5, 6))
    def keep(self, session: _Session, length: int, bonus: int) -> None:
        """Commit what was guessed, down to some depth, and a bonus token."""
        self._draft({session: (*session.best_path[:length], bonus)}, takes_conditional=True)

    @rule(session=consumes(sessions))
    def release(self, session: _Session) -> None:
        """End a session."""
        self.engine.release(session.id)
        self.open_sessions.remove(session)

    @invariant()
    def no_page_is_lost(self) -> None:
        """Free, cached and private pages are all the pages; a page is shared by sessions of equal beginnings alone."""
        if not hasattr(self, "engine"):
            return
        kv = self.engine._kv
        rows = [session.rows for session in self.engine._sessions.values()]
        private = [page for each in rows for page in each._pages[len(each._shared) :]]
        shared = {page.page for each in rows for page in each._shared}
        assert len(set(private)) == len(private)
        assert not shared & set(private)
        assert kv.num_pages - kv.num_free // kv.page_size == len(private) + len(shared)

    def teardown(self) -> None:
        """When all have gone, every slot is free or can be."""
        if hasattr(self, "engine"):
            for session in self.open_sessions:
                self.engine.release(session.id)
            assert self.engine.num_sessions == 0
            assert self.engine.num_free_slots == KV_TOKENS // self.page_size * self.page_size

    def _open(self, source: int, prompt: tuple[int, ...]) -> Any:
        if len(prompt) > LONGEST_TEXT:
            return multiple()
        self.num_opened += 1
        session = _Session(self.num_opened, source, list(prompt))
        with self._unchanged_if_refused() as refused:
            self.engine.start(session.id, prompt, Sampling())
        if refused:
            return multiple()
        self.open_sessions.append(session)
        return session

    def _draft(self, news: dict[_Session, tuple[int, ...]], *, takes_conditional: bool) -> None:
        news = {session: new for session, new in news.items() if len(session.text) + len(new) <= LONGEST_TEXT}
        while news:
            proposals = [self._proposal(session, new, takes_conditional) for session, new in news.items()]
            with self._unchanged_if_refused() as refused:
                answers = self.engine.propose(proposals)
            if not refused:
                break
            news = {session: new for session, new in news.items() if session.id != refused[0]}
        for (session, new), marginals in zip(news.items(), answers if news else (), strict=True):
            session.text += new
            session.num_features = len(session.text) - 1
            session.takes_conditional = takes_conditional
            session.best_path = marginals.token_ids[: marginals.num_depths, 0].tolist()
            assert marginals.num_depths == HORIZON
            CHECKS[self.kind](session, marginals)

    def _proposal(self, session: _Session, new: tuple[int, ...], takes_conditional: bool) -> Proposal:
        text = (*session.text, *new)
        given = None
        if not isinstance(self.engine, CausalLMDrafter):
            given = features_of(session.target, text[:-1], session.num_features)
        return Proposal(session.id, Commit(new, len(text)), HORIZON, WIDTH, given, takes_conditional)

    def _unchanged_if_refused(self) -> _Unchanged:
        return _Unchanged(self.engine)


class _Unchanged:
    """What runs inside may be refused for want of memory; then it changes nothing, and the list names the session."""

    def __init__(self, engine: FeatureDrafter | CausalLMDrafter) -> None:
        self._engine = engine
        self._refused: list[int] = []

    def __enter__(self) -> list[int]:
        self._before = self._state()
        return self._refused

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, KvExhausted):
            return False
        assert error.num_needed > error.num_free
        assert self._state() == self._before
        self._refused.append(error.session)
        return True

    def _state(self) -> tuple[int, int, int]:
        return self._engine.num_free_slots, self._engine.num_sessions, self._engine.positions_computed


_THOROUGH = settings(
    max_examples=8, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _machine(kind: str, page_size: int) -> Any:
    case = type(f"{kind}{page_size}", (DraftedSessions,), {"kind": kind, "page_size": page_size}).TestCase
    case.settings = _THOROUGH
    return case


TestRecurrentInPagesOfOne = _machine("recurrent", 1)
TestRecurrentInPagesOfSixteen = _machine("recurrent", 16)
TestDFlashInPagesOfOne = _machine("dflash", 1)
TestDFlashInPagesOfEight = _machine("dflash", 8)
TestCausalLMInPagesOfOne = _machine("causal_lm", 1)
TestCausalLMInPagesOfEight = _machine("causal_lm", 8)
TestCausalLMInPagesOfSixteen = _machine("causal_lm", 16)


@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_a_causal_lm_computes_a_common_beginning_once(page_size: int) -> None:
    """A second session computes of its prompt what is in no full page of the first's committed text, and its last token."""
    engine = fresh("causal_lm", page_size)
    engine.start(1, range(5, 25), Sampling())
    (first,) = engine.propose([Proposal(1, Commit(tuple(range(25, 30)), 25), HORIZON, WIDTH)])
    computed = engine.positions_computed
    engine.start(2, range(5, 29), Sampling())
    assert engine.positions_computed - computed == 24 - 23 // page_size * page_size
    (second,) = engine.propose([Proposal(2, Commit((29,), 25), HORIZON, WIDTH)])
    np.testing.assert_allclose(first.log_probs, second.log_probs, atol=TOLERANCE)


def test_a_causal_lm_computes_a_path_that_was_accepted_once() -> None:
    """Of the next commit only what the last path does not begin with is computed, and the bonus token."""
    engine = fresh("causal_lm", 8)
    engine.start(1, range(5, 25), Sampling())
    (marginals,) = engine.propose([Proposal(1, Commit((25,), 21), HORIZON, WIDTH)])
    path = marginals.token_ids[:, 0].tolist()
    computed = engine.positions_computed
    engine.propose([Proposal(1, Commit((*path[:2], 30), 24), HORIZON, WIDTH)])
    assert engine.positions_computed - computed == 1 + HORIZON - 1


@pytest.mark.parametrize("kind", ["causal_lm", "dflash", "recurrent"])
def test_a_session_without_room_alone_is_refused(kind: str) -> None:
    """Its proposal is answered with Overloaded, the others' of its batch with what they get alone."""
    step = Step(lambda: fresh(kind, 8, kv_tokens=64))
    step.load()
    texts = {1: list(range(5, 25)), 2: list(range(30, 40))}
    for session, text in texts.items():
        step.engine.start(session, text, Sampling())

    def proposal(session: int, num_new: int) -> Proposal:
        text = [*texts[session], *[50] * num_new]
        given = None if kind == "causal_lm" else features_of(0, text[:-1])
        return Proposal(session, Commit((50,) * num_new, len(text)), HORIZON, WIDTH, given)

    (refused,) = step([proposal(1, 40)])
    assert isinstance(refused, Overloaded)
    refused, answer = step([proposal(1, 40), proposal(2, 1)])
    assert isinstance(refused, Overloaded)
    assert "session 1 needs" in str(refused)
    assert isinstance(answer, Answer)
    alone = fresh(kind, 8)
    alone.start(2, texts[2], Sampling())
    np.testing.assert_array_equal(answer.marginals.token_ids, alone.propose([proposal(2, 1)])[0].token_ids)
