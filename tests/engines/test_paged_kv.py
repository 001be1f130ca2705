"""Pages, cached prefixes and rows lose nothing, mix nothing up and share only what was committed."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from treewire.kv.pages import PAGE_SIZES, PagedKv
from treewire.kv.rows import SessionRows

NUM_TOKENS = 96
LARGEST_TREE = 7
LONGEST_PROMPT = 24

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST_PROMPT).map(tuple)  # two tokens only: prefixes meet
trees = st.lists(st.tuples(st.integers(0, 1), st.integers(0, LARGEST_TREE)), min_size=1, max_size=LARGEST_TREE)


@dataclass(eq=False)
class _Session:
    """A session beside its dense reference: the tokens it has committed, and its tree as nodes and their paths."""

    rows: SessionRows
    prompt: tuple[int, ...]
    committed: list[int]
    tree: list[tuple[int, ...]] = field(default_factory=list)
    tree_slots: list[int] = field(default_factory=list)


class PagedSessions(RuleBasedStateMachine):
    """Random sessions over a small memory. What a slot holds is modelled as the whole text up to its token.

    That is what keys and values are a function of: if a session reads a slot, it must hold the session's own text there.
    """

    page_size = 1
    sessions: Bundle[_Session] = Bundle("sessions")

    @initialize()
    def make(self) -> None:
        """An empty memory."""
        self.kv = PagedKv(NUM_TOKENS, self.page_size)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.open_sessions: list[_Session] = []

    @rule(target=sessions, prompt=prompts)
    def open(self, prompt: tuple[int, ...]) -> Any:
        """Open a session if there is room."""
        return self._open(prompt)

    @rule(target=sessions, session=sessions, more=prompts)
    def fork(self, session: _Session, more: tuple[int, ...]) -> Any:
        """Open a session with another's text so far as its prompt: what is cached of it need not be computed."""
        num_full = len(session.committed) // self.page_size * self.page_size
        prompt = (*session.committed, *more)
        opened = self._open(prompt)
        if isinstance(opened, _Session):  # there was room
            assert opened.rows.num_committed >= num_full
        return opened

    @rule(session=sessions, size=st.integers(1, 9))
    def prefill(self, session: _Session, size: int) -> None:
        """Compute the next chunk of the prompt."""
        start = session.rows.num_committed
        chunk = session.prompt[start : start + size]
        if not chunk:
            return
        self._write(session.rows.next_slots(len(chunk)), [session.prompt[: start + i + 1] for i in range(len(chunk))])
        session.rows.commit_chunk(chunk)
        session.committed += chunk

    @rule(session=sessions, nodes=trees)
    def score(self, session: _Session, nodes: list[tuple[int, int]]) -> None:
        """Compute a tree, if there is room."""
        rows = session.rows
        if rows.awaits_keep or not rows.prefill_is_complete:
            return
        room = rows.room_for(len(nodes))
        if room.num_needed > room.num_free:
            return
        session.tree_slots = rows.take_tree_slots(len(nodes)).tolist()
        session.tree = []
        for number, (token, parent) in enumerate(nodes):
            before = session.tree[parent % number] if number else tuple(session.committed)
            session.tree.append((*before, token))
        self._write(session.tree_slots, session.tree)

    @rule(session=sessions, last=st.integers(0, LARGEST_TREE))
    def keep(self, session: _Session, last: int) -> None:
        """Keep the path to a node of the tree that waits."""
        if not session.rows.awaits_keep:
            return
        text = session.tree[last % len(session.tree)]
        path = [session.tree.index(text[: length + 1]) for length in range(len(session.committed), len(text))]
        if path != sorted(path):  # equal siblings: another path to the same text
            path = [path[0]]
            text = session.tree[path[0]]
        moves = session.rows.keep(path, text[len(session.committed) :])
        assert self.page_size > 1 or not len(moves)
        self._write(moves.destinations, [self.memory[slot] for slot in moves.sources.tolist()])
        session.committed, session.tree, session.tree_slots = list(text), [], []

    @rule(session=consumes(sessions))
    def release(self, session: _Session) -> None:
        """End a session, in whatever state it is."""
        session.rows.release()
        self.open_sessions.remove(session)

    @invariant()
    def everyone_reads_their_own_text(self) -> None:
        """Each committed row and each node of a waiting tree holds the session's own text up to it."""
        for session in getattr(self, "open_sessions", []):
            text = tuple(session.committed)
            slots = session.rows.committed.tolist()
            assert [self.memory[slot] for slot in slots] == [text[: place + 1] for place in range(len(text))]
            assert [self.memory[slot] for slot in session.tree_slots] == session.tree

    @invariant()
    def no_page_is_lost(self) -> None:
        """Free, cached and private pages are all the pages."""
        if not hasattr(self, "kv"):
            return
        private = sum(len(session.rows._pages) - len(session.rows._shared) for session in self.open_sessions)
        held = self.kv.num_pages - self.kv.num_free // self.page_size - private
        shared = {page.page for session in self.open_sessions for page in session.rows._shared}
        assert held == len(shared)

    def teardown(self) -> None:
        """When all have gone, every slot is free or can be."""
        if hasattr(self, "kv"):
            for session in self.open_sessions:
                session.rows.release()
            assert self.kv.num_free == self.kv.num_slots
            assert sorted(self.kv.take(self.kv.num_pages)) == list(range(self.kv.num_pages))

    def _open(self, prompt: tuple[int, ...]) -> Any:
        room = self.kv.room_for(prompt, LARGEST_TREE)
        if room.num_needed > room.num_free:
            return multiple()
        rows = SessionRows(self.kv, prompt)
        assert rows.num_committed < len(prompt)
        session = _Session(rows, prompt, list(prompt[: rows.num_committed]))
        self.open_sessions.append(session)
        return session

    def _write(self, slots: Any, texts: list[tuple[int, ...]]) -> None:
        """Write rows. Nobody else's row may be in these slots."""
        for slot, text in zip([int(slot) for slot in slots], texts, strict=True):
            self.memory[slot] = text


class _PagesOfEight(PagedSessions):
    page_size = 8


class _PagesOfSixteen(PagedSessions):
    page_size = 16


_THOROUGH = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestPagesOfOne = PagedSessions.TestCase
TestPagesOfEight = _PagesOfEight.TestCase
TestPagesOfSixteen = _PagesOfSixteen.TestCase
TestPagesOfOne.settings = TestPagesOfEight.settings = TestPagesOfSixteen.settings = _THOROUGH


def filled(kv: PagedKv, prompt: tuple[int, ...]) -> SessionRows:
    """A session with its prompt computed."""
    rows = SessionRows(kv, prompt)
    rows.commit_chunk(prompt[rows.num_committed :])
    return rows


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_second_session_starts_behind_the_full_pages_of_the_first(page_size: int) -> None:
    """Whole pages of an equal beginning are shared at once, while the first session lives; the last token never is."""
    kv = PagedKv(256, page_size)
    first = filled(kv, tuple(range(40)))
    second = SessionRows(kv, tuple(range(40)))
    assert second.num_committed == 39 // page_size * page_size
    assert second.committed.tolist() == first.committed[: second.num_committed].tolist()
    assert SessionRows(kv, (*range(20), 99, *range(21, 40))).num_committed == 20 // page_size * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_tree_is_never_shared(page_size: int) -> None:
    """Nodes that were not kept are in no prefix, kept ones are once their page is full."""
    kv = PagedKv(256, page_size)
    rows = filled(kv, tuple(range(16)))
    rows.take_tree_slots(17)
    assert kv.match([*range(16), *range(100, 117)]) == kv.match(range(17))
    rows.keep(tuple(range(16)), tuple(range(100, 116)))
    assert len(kv.match((*range(16), *range(100, 117)))) * page_size == 32


def test_with_pages_of_one_slot_nothing_moves() -> None:
    """The kept rows stay where they were computed, in the order of the path; the others' slots are free."""
    kv = PagedKv(10)
    rows = filled(kv, (5, 6, 7))
    prompt_slots = rows.committed.tolist()
    tree_slots = rows.take_tree_slots(5).tolist()
    assert not len(rows.keep((0, 2, 4), (1, 2, 3)))
    assert rows.committed.tolist() == [*prompt_slots, tree_slots[0], tree_slots[2], tree_slots[4]]
    assert kv.num_free == 4


def test_in_larger_pages_only_rows_behind_a_gap_move() -> None:
    """The first kept nodes stay, later ones move up to where the sequence goes on."""
    kv = PagedKv(64, 8)
    rows = filled(kv, tuple(range(6)))
    tree_slots = rows.take_tree_slots(6).tolist()
    moves = rows.keep((0, 1, 3, 5), (1, 2, 3, 4))
    assert (moves.sources.tolist(), moves.destinations.tolist()) == ([tree_slots[3], tree_slots[5]], tree_slots[2:4])
    assert rows.committed.tolist()[6:] == tree_slots[:4]


def test_the_longest_unused_prefix_is_evicted_first() -> None:
    """A full memory gives up cached pages in the order in which their last sessions left, ends before beginnings."""
    kv = PagedKv(12)
    texts = [(session,) * 4 for session in range(3)]
    sessions = [filled(kv, text) for text in texts]
    for number in (1, 0, 2):
        sessions[number].release()
    assert kv.num_free == 12
    taken = filled(kv, (9,) * 6)
    assert [len(kv.match((*text, 0))) for text in texts] == [2, 0, 4]
    again = SessionRows(kv, (*texts[0], 7))  # holding its two pages keeps them from being evicted by what it takes itself
    assert again.num_committed == 2
    assert kv.num_free == 12 - 6 - 5
    taken.release()


def test_what_is_in_use_is_not_evicted() -> None:
    """Room counts cached pages that nobody holds, and not those that the new session itself will hold."""
    kv = PagedKv(8)
    filled(kv, (1, 2, 3, 4)).release()
    room = kv.room_for((1, 2, 3, 4, 5), num_tree_nodes=4)
    assert room == (5, 4)


def test_equal_texts_end_in_the_same_pages() -> None:
    """Two sessions that compute the same prompt at the same time hold one copy of it afterwards."""
    kv = PagedKv(32)
    rows = [SessionRows(kv, (1, 2, 3, 4)) for _ in range(2)]
    assert kv.num_free == 24
    for session in rows:
        session.commit_chunk((1, 2, 3, 4))
    assert kv.num_free == 28
    assert rows[0].committed.tolist() == rows[1].committed.tolist()


@pytest.mark.parametrize(("num_tokens", "page_size", "message"), [(64, 4, "one of 1, 8, 16"), (0, 1, "0 tokens"), (7, 8, "7")])
def test_wrong_sizes_are_refused(num_tokens: int, page_size: int, message: str) -> None:
    """The message has the value, and the limit or the choice."""
    with pytest.raises(ValueError, match=message):
        PagedKv(num_tokens, page_size)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_twenty_thousand_rounds_leave_pages_and_memory_at_the_baseline(page_size: int) -> None:
    """After 20,000 rounds of random sessions every page is free, and Python's memory is that of the first thousand."""
    kv, rng = PagedKv(2048, page_size), random.Random(page_size)
    _run_rounds(kv, rng, 1_000)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    _run_rounds(kv, rng, 19_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kv.num_free == kv.num_slots
    assert kv.prefixes.num_pages <= kv.num_pages
    assert grown < 2_000_000  # one entry for each of the 2,048 slots and little more, not one for each round


def _run_rounds(kv: PagedKv, rng: random.Random, num_rounds: int) -> None:
    sessions: list[SessionRows] = []
    for _ in range(num_rounds):
        if len(sessions) < 4 or rng.random() < 0.05:
            prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 60)))
            room = kv.room_for(prompt, 64)
            if room.num_needed <= room.num_free:
                sessions.append(filled(kv, prompt))
        rows = rng.choice(sessions)
        if (room := rows.room_for(9)).num_needed <= room.num_free:
            rows.take_tree_slots(9)
            nodes = (0, *sorted(rng.sample(range(1, 9), rng.randrange(4))))
            rows.keep(nodes, [rng.randrange(3) for _ in nodes])
        if rows.num_committed > 300 or rng.random() < 0.03:
            rows.release()
            sessions.remove(rows)
    for rows in sessions:
        rows.release()
