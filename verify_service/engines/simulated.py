"""This file is the simulated target: the system's own trees, sessions and KV slots, and a hash in place of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from treewire.core.acceptance import Acceptance
from treewire.core.distributions import RowDistributions, highest
from treewire.core.history import History, NodeHistories
from treewire.core.noise import noise_row
from treewire.core.processing import allow_only, choose, process
from treewire.core.sampling import Sampling
from treewire.core.simulated import Prefix, SimulatedDeath, SimulatedModel
from treewire.core.tree import DraftTree
from treewire.kv.pages import KvExhausted, PagedKv, Room
from treewire.kv.rows import SessionRows
from verify_service.engine import (
    Masks,
    NodeProbabilities,
    Posterior,
    PrefillChunk,
    Scoring,
    SessionId,
    Target,
    Unsupported,
)
from verify_service.engines.admission import check_chunk, check_open, check_tree

_NUM_NOISE_ROWS = 1024


@dataclass(frozen=True)
class TargetFaults:
    """What goes wrong, by the number of the step; the first is 0, and a service's warm-up counts.

    `fail_steps` raise RuntimeError before anything changes; from `die_at_step` on every call but `release` raises
    SimulatedDeath.
    """

    fail_steps: frozenset[int] = frozenset()
    die_at_step: int | None = None


@dataclass
class _Session:
    """`prefix` is that of the rows in `rows`; `tree` was scored and awaits its keep, with the prefix of each of its nodes."""

    prompt: tuple[int, ...]
    sampling: Sampling
    num_node_probabilities: int
    rows: SessionRows
    history: History
    prefix: Prefix
    tree: DraftTree | None = None
    node_prefixes: list[Prefix] = field(default_factory=list)

    def check(self, item: PrefillChunk | Scoring, target: Target) -> None:
        """Raises ValueError if this is not work that the session can take now."""
        if isinstance(item, PrefillChunk):
            check_chunk(self.prompt, self.rows.num_committed, item)
            return
        if not self.rows.prefill_is_complete:
            raise ValueError(f"{self.rows.num_committed} of {len(self.prompt)} prompt tokens are prefilled, no tree yet")
        if self.tree is not None:
            raise ValueError(f"the last tree of {len(self.tree)} nodes awaits its keep")
        check_tree(target, self.rows.num_committed, item.tree)

    def take_chunk(self, chunk: PrefillChunk) -> None:
        """Prefill the next tokens of the prompt."""
        self.rows.commit_chunk(chunk.token_ids)
        self.prefix = self.prefix.extend(chunk.token_ids)

    def take_tree(self, tree: DraftTree) -> None:
        """Compute each node after its own ancestors, in provisional rows."""
        self.rows.take_tree_slots(len(tree))
        self.tree = tree
        self.node_prefixes = []
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            before = self.node_prefixes[parent] if self.node_prefixes else self.prefix
            self.node_prefixes.append(before.extend([token_id]))

    def histories(self) -> NodeHistories:
        """What was said before each choice of the step: after the tree that awaits its keep, else after the prompt."""
        return self.history.now() if self.tree is None else self.history.over(self.tree)

    def keep(self, nodes: tuple[int, ...]) -> None:
        """Keep a path of the tree. Raises ValueError if no tree awaits it or the nodes are no path from the root."""
        if self.tree is None:
            raise ValueError("there is no tree to keep nodes of")
        if not nodes or not 0 <= nodes[-1] < len(self.tree) or nodes != self.tree.path(nodes[-1]):
            raise ValueError(f"nodes {nodes} are no path from the root of a tree of {len(self.tree)} nodes")
        token_ids = [self.tree.token_ids[node] for node in nodes]
        self.rows.keep(nodes, token_ids)
        self.history.extend(token_ids)
        self.prefix = self.node_prefixes[nodes[-1]]
        self.tree, self.node_prefixes = None, []


@dataclass(frozen=True)
class _Choices:
    """Where the target chooses for one item: after these prefixes, tokens for these absolute positions."""

    session: _Session
    prefixes: Sequence[Prefix]
    positions: Sequence[int]
    masks: Masks | None


class SimulatedTarget:
    """A `SimulatedModel` as target, never torch: `verify_service.engine.TargetEngine`.

    Room: `open` takes the prompt's KV slots and wants one largest tree more to be free; a tree takes its slots when it is
    scored. Either raises KvExhausted before anything is taken. Every refusal of `step` leaves all sessions as they were.
    A step takes `step_seconds`, and `position_seconds` more for each chunk token and tree node.
    """

    def __init__(
        self,
        model: SimulatedModel,
        max_tree_nodes: int = 1024,
        max_context: int = 4096,
        kv_tokens: int = 1 << 18,
        kv_page_size: int = 1,
        tokenizer_hash: str = "",
        step_seconds: float = 0.0,
        position_seconds: float = 0.0,
        faults: TargetFaults | None = None,
    ) -> None:
        if min(max_tree_nodes, max_context) < 1:
            raise ValueError(f"max_tree_nodes {max_tree_nodes} and max_context {max_context} must be at least 1")
        if kv_tokens <= max_tree_nodes:
            raise ValueError(f"kv_tokens is {kv_tokens:,}, it must be above the largest tree, {max_tree_nodes:,} nodes")
        self._model = model
        self._step_seconds = step_seconds
        self._position_seconds = position_seconds
        self._faults = faults or TargetFaults()
        self._target = Target(
            "simulated",
            "simulated",
            model.vocabulary_size,
            tokenizer_hash,
            max_tree_nodes,
            max_context,
            (model.end_token_id,),
        )
        self._kv = PagedKv(kv_tokens, kv_page_size)
        self._noise_row = lru_cache(_NUM_NOISE_ROWS)(noise_row)
        self._sessions: dict[SessionId, _Session] = {}
        self._num_steps = 0
        self.positions_computed = 0

    @property
    def target(self) -> Target:
        """What this engine serves."""
        return self._target

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def num_free_slots(self) -> int:
        """Token positions for which a KV slot is free, or would be if cached prefixes were evicted."""
        return self._kv.num_free

    def open(
        self,
        session: SessionId,
        prompt: Sequence[int],
        sampling: Sampling,
        num_output_tokens: int = 0,
        num_node_probabilities: int = 0,
        wants_features: bool = False,
        first_feature_position: int = 0,
    ) -> int:
        """Make room for a session; how many tokens of its prompt are computed already.

        Raises Unsupported, ValueError or KvExhausted.
        """
        self._check_alive()
        if wants_features:
            raise Unsupported("the simulated target has no hidden states to make context features of")
        if session in self._sessions:
            raise ValueError(f"session {session} is open already")
        check_open(self._target, prompt, sampling, num_output_tokens, num_node_probabilities)
        self._check_room(session, self._kv.room_for(prompt, self._target.max_tree_nodes))
        rows, history = SessionRows(self._kv, prompt), History(prompt, num_output_tokens)
        prefix = Prefix.of(prompt[: rows.num_committed])
        self._sessions[session] = _Session(tuple(prompt), sampling, num_node_probabilities, rows, history, prefix)
        return rows.num_committed

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """Run chunks and trees through the model at once; one posterior each, in order."""
        self._begin_step()
        self._check_work(work)
        choices = [self._take(item) for item in work]
        self._spend(work)
        prefixes = [prefix for choice in choices for prefix in choice.prefixes]
        stops = np.cumsum([len(choice.prefixes) for choice in choices])
        logits = np.split(self._model.logits(prefixes), stops[:-1])
        return [self._posterior(choice, rows) for choice, rows in zip(choices, logits, strict=True)] if work else []

    def keep(self, session: SessionId, acceptance: Acceptance) -> None:
        """Of the session's last tree keep the accepted nodes' rows; the others' slots are free again."""
        self._check_alive()
        self._opened(session).keep(acceptance.nodes)

    def release(self, session: SessionId) -> None:
        """Free everything the session holds. An unknown session is no error."""
        if released := self._sessions.pop(session, None):
            released.rows.release()

    def _check_room(self, session: SessionId, room: Room) -> None:
        if room.num_needed > room.num_free:
            raise KvExhausted(session, room.num_needed, room.num_free, self._kv.num_slots)

    def _check_work(self, work: Sequence[PrefillChunk | Scoring]) -> None:
        """Refuse what cannot be done, before anything changes."""
        seen: set[SessionId] = set()
        num_taken = 0
        for item in work:
            if item.session in seen:
                raise ValueError(f"session {item.session} has two items in one step")
            seen.add(item.session)
            self._opened(item.session).check(item, self._target)
            if isinstance(item, Scoring):
                room = self._sessions[item.session].rows.room_for(len(item.tree))
                self._check_room(item.session, Room(room.num_needed, room.num_free - num_taken))
                num_taken += room.num_needed

    def _opened(self, session: SessionId) -> _Session:
        if session not in self._sessions:
            raise ValueError(f"session {session} is not open")
        return self._sessions[session]

    def _take(self, item: PrefillChunk | Scoring) -> _Choices:
        session = self._sessions[item.session]
        if isinstance(item, PrefillChunk):
            session.take_chunk(item)
            return _Choices(session, [session.prefix] * item.last, [session.rows.num_committed], item.masks)
        session.take_tree(item.tree)
        root_position = session.rows.num_committed
        positions = [root_position + depth + 1 for depth in item.tree.depths]
        return _Choices(session, session.node_prefixes, positions, item.masks)

    def _posterior(self, choices: _Choices, logits: NDArray[np.float32]) -> Posterior:
        if not choices.prefixes:
            return Posterior(())
        sampling = choices.session.sampling
        allowed = allow_only(logits, None if choices.masks is None else choices.masks.rows())
        log_probs = process(allowed, sampling, choices.session.histories() if sampling.reads_history else None)
        chosen = choose(log_probs, None if sampling.is_greedy else self._noise(sampling.seed, choices.positions))
        return Posterior(
            tuple(chosen.tolist()),
            _likeliest(log_probs, choices.session.num_node_probabilities),
            distributions=RowDistributions(logits, log_probs, is_greedy=sampling.is_greedy),
        )

    def _noise(self, seed: int, positions: Sequence[int]) -> NDArray[np.float32]:
        return np.stack([self._noise_row(seed, position, self._model.vocabulary_size) for position in positions])

    def _begin_step(self) -> None:
        step = self._num_steps
        self._num_steps += 1
        self._check_alive()
        if step in self._faults.fail_steps:
            raise RuntimeError(f"simulated fault in step {step}")

    def _spend(self, work: Sequence[PrefillChunk | Scoring]) -> None:
        """Count the positions of a step, and take the time that they cost."""
        num_positions = sum(len(item.token_ids if isinstance(item, PrefillChunk) else item.tree) for item in work)
        self.positions_computed += num_positions
        time.sleep(self._step_seconds + self._position_seconds * num_positions)

    def _check_alive(self) -> None:
        if self._faults.die_at_step is not None and self._num_steps > self._faults.die_at_step:
            raise SimulatedDeath(f"the simulated target died in step {self._faults.die_at_step}")


def _likeliest(log_probs: NDArray[np.float32], count: int) -> tuple[NodeProbabilities, ...]:
    """The `count` likeliest tokens of each row, fewer where fewer are left; none at all if `count` is 0."""
    if not count:
        return ()
    return tuple(NodeProbabilities(*highest(row, count)) for row in log_probs)
