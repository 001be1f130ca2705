"""This file is the target engine on transformers: sessions, steps over ragged batches of chunks and trees, keeping."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from treewire.core.acceptance import Acceptance
from treewire.core.history import History
from treewire.core.sampling import Sampling
from treewire.kv.pages import KvExhausted, PagedKv, Room
from treewire.kv.rows import SessionRows
from verify_service.engine import Posterior, PrefillChunk, Scoring, SessionId, Target, Unsupported
from verify_service.engines.transformers.choices import WholeRows
from verify_service.engines.transformers.lean import LeanForward
from verify_service.engines.transformers.runner import LocalRunner, Runner
from verify_service.engines.transformers.selection import ForwardKind, LoadedModel, load_model
from verify_service.engines.transformers.session import Session, check_token_ids
from verify_service.engines.transformers.static_step import GraphsMode, StaticRunner


class TransformersTarget:
    """A causal language model of transformers as target: `verify_service.engine.TargetEngine`.

    Room: `open` takes the prompt's KV slots and wants one largest tree more to be free; a tree takes its slots when it is
    scored. Either raises KvExhausted, naming the session, before anything is computed or taken: the caller drops or
    delays that session and goes on with the others. Every refusal of `step` leaves all sessions as they were. If the
    model itself fails, the sessions of that step have to be released.
    """

    def __init__(self, runner: Runner, target: Target, kv: PagedKv) -> None:
        if kv.num_slots <= target.max_tree_nodes:
            raise ValueError(
                f"kv_tokens is {kv.num_slots:,}, it must be above the largest tree, {target.max_tree_nodes:,} nodes"
            )
        self._runner = runner
        self._target = target
        self._kv = kv
        self._sessions: dict[SessionId, Session] = {}
        self.positions_computed = 0

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        name: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        max_context: int | None = None,
        max_tree_nodes: int = 1024,
        kv_tokens: int = 16384,
        kv_page_size: int = 1,
        num_threads: int | None = None,
        forward: ForwardKind = "auto",
        feature_projection: Path | None = None,
        graphs: GraphsMode = "auto",
    ) -> TransformersTarget:
        """Load a model from a directory, a hub id or a GGUF file: the lean forward, or transformers' modules, probed.

        `kv_tokens` token positions fit in all sessions together; one costs layers x KV heads x (key + value size) elements
        (SmolLM2-135M in float32: 46,080 bytes, so 16,384 of them 755 MB); they are handed out in pages of `kv_page_size`.
        `num_threads` is torch's, for the whole process. `feature_projection` is the checkpoint of the drafter for which
        context features are made. `graphs` says whether trees run on static buffers, which CUDA captures; auto is there alone.
        Raises Unsupported with the reason for a model that cannot be served, ValueError for a
        wrong size.
        """
        if max_tree_nodes < 1:
            raise ValueError(f"max_tree_nodes is {max_tree_nodes}, it must be at least 1, the root")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        kv = PagedKv(kv_tokens, kv_page_size)
        loaded = load_model(
            model,
            kind=forward,
            device=device,
            dtype=dtype,
            max_context=max_context,
            kv_slots=kv.num_slots + 1,  # one for what fills buckets
            feature_projection=feature_projection,
        )
        projection = loaded.projection
        target = Target(
            engine="transformers",
            model=name or str(model),
            vocabulary_size=loaded.vocabulary_size,
            tokenizer_hash=loaded.tokenizer_hash,
            max_tree_nodes=max_tree_nodes,
            max_context=loaded.max_context,
            end_token_ids=loaded.end_token_ids,
            feature_size=projection.feature_size if projection else 0,
            tapped_layers=projection.tapped_layers if projection else (),
            feature_projection_hash=projection.hash if projection else "",
        )
        return cls(_runner(loaded, graphs, dtype, max_tree_nodes), target, kv)

    @property
    def target(self) -> Target:
        """What this engine serves."""
        return self._target

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def num_missed_graphs(self) -> int:
        """Steps that ran outside the buckets of static buffers; 0 if there are none."""
        return self._runner.num_missed_graphs

    @property
    def num_free_slots(self) -> int:
        """Token positions for which KV memory is free, or would be if cached prefixes were evicted."""
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
        """Make room for a session; how many tokens of its prompt are computed already. Computes nothing yet.

        Raises ValueError for a wrong prompt, count or parameter, KvExhausted without room.
        """
        if session in self._sessions:
            raise ValueError(f"session {session} is open already")
        self._check_request(tuple(prompt), sampling, num_output_tokens, num_node_probabilities)
        if wants_features and not self._target.feature_size:
            raise Unsupported("this target gives no context features: it was loaded without a feature projection")
        shares = not wants_features or first_feature_position >= len(prompt) - 1
        self._check_room(session, self._kv.room_for(prompt, self._target.max_tree_nodes, shares=shares))
        opened = Session(
            session,
            tuple(prompt),
            sampling,
            num_node_probabilities,
            SessionRows(self._kv, prompt, shares=shares),
            History(prompt, num_output_tokens),
            wants_features,
        )
        self._sessions[session] = opened
        return opened.rows.num_committed

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """Run chunks and trees of any sessions through the target in one forward; one posterior each, in order."""
        self._check_work(work)
        parts = [self._sessions[item.session].part(item) for item in work]
        if not parts:
            return []
        posteriors = self._runner.step(parts)
        self.positions_computed += sum(map(len, parts))
        for item in work:
            if isinstance(item, PrefillChunk):
                self._sessions[item.session].rows.commit_chunk(item.token_ids)
        return posteriors

    def keep(self, session: SessionId, acceptance: Acceptance) -> None:
        """Of the session's last tree keep the accepted nodes' state; the rest is gone. Computes nothing.

        With pages of one slot nothing is moved either; in larger ones the rows of nodes that are not the tree's first are.
        """
        moves = self._opened(session).keep(acceptance)
        if len(moves):
            self._runner.move(moves)

    def release(self, session: SessionId) -> None:
        """Free everything the session holds. An unknown session is no error."""
        released = self._sessions.pop(session, None)
        if released is not None:
            released.rows.release()
            self._runner.forget(session)

    def _check_request(
        self, prompt: tuple[int, ...], sampling: Sampling, num_output_tokens: int, num_node_probabilities: int
    ) -> None:
        if not prompt:
            raise ValueError("the prompt is empty, it must have at least 1 token")
        if len(prompt) > self._target.max_context:
            raise ValueError(f"prompt has {len(prompt):,} tokens, this target's context is {self._target.max_context:,}")
        check_token_ids(prompt, self._target.vocabulary_size)
        sampling.check_vocabulary(self._target.vocabulary_size)
        if not 0 <= num_output_tokens <= len(prompt):
            raise ValueError(f"num_output_tokens is {num_output_tokens}, it must be from 0 to the prompt's {len(prompt)}")
        if not 0 <= num_node_probabilities <= self._target.vocabulary_size:
            raise ValueError(
                f"num_node_probabilities is {num_node_probabilities}, it must be from 0 to {self._target.vocabulary_size:,}"
            )

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

    def _opened(self, session: SessionId) -> Session:
        if session not in self._sessions:
            raise ValueError(f"session {session} is not open")
        return self._sessions[session]


def _runner(loaded: LoadedModel, graphs: GraphsMode, dtype: str, max_tree_nodes: int) -> Runner:
    """On static buffers where that is asked for, or pays. Raises Unsupported where it is asked for and cannot be."""
    forward = loaded.forward
    if graphs == "on" or (graphs == "auto" and forward.device.type == "cuda" and isinstance(forward, LeanForward)):
        if not isinstance(forward, LeanForward) or dtype == "int8":
            kind = "int8" if isinstance(forward, LeanForward) else "the forward of transformers"
            raise Unsupported(f"graphs are for the lean forward in float types, this is {kind}: set graphs to off")
        chooser = WholeRows(loaded.vocabulary_size)
        return StaticRunner(forward, chooser, max_nodes=max_tree_nodes, max_context=loaded.max_context)
    return LocalRunner(forward, WholeRows(loaded.vocabulary_size))
