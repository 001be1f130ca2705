"""This file is the target engine on SGLang: sessions and their KV slots here, the model in the ranks' processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from treewire.checkpoint import feature_projection
from treewire.core.acceptance import Acceptance
from treewire.core.history import History
from treewire.core.sampling import Sampling
from treewire.kv.pages import KvExhausted
from treewire.vocabulary import load_tokenizer, vocabulary_hash
from verify_service.engine import Posterior, PrefillChunk, Scoring, SessionId, Target, Unsupported
from verify_service.engines.admission import check_open
from verify_service.engines.ranks.processes import Ranks
from verify_service.engines.ranks.questions import RankDistributions
from verify_service.engines.sglang.messages import Part, Ready, StepAnswer, StepCommand
from verify_service.engines.sglang.options import SglangOptions
from verify_service.engines.sglang.plans import rank_plans, run_plan
from verify_service.engines.sglang.refusals import check
from verify_service.engines.sglang.release import check_version
from verify_service.engines.sglang.session import NumberPool, Session
from verify_service.engines.sglang.traits import ModelTraits, end_token_ids_of

_log = logging.getLogger(__name__)


class SglangTarget:
    """A model that SGLang runs as target: `verify_service.engine.TargetEngine`.

    The chunks of a step are one forward, its trees another, padded to the next captured width. Room is given as by the
    transformers engine: `open` takes the prompt's KV slots and wants one largest tree more to be free, a tree takes its slots
    when it is scored; KvExhausted and every refusal leave all sessions as they were. If a rank is lost, `step` raises
    EngineLost, and the engine is of no more use.
    """

    def __init__(self, ranks: Ranks, ready: Ready, target: Target) -> None:
        if ready.num_slots <= target.max_tree_nodes:
            raise ValueError(
                f"there is KV memory for {ready.num_slots:,} tokens, it must be above the largest tree, "
                f"{target.max_tree_nodes:,} nodes; give max_total_tokens or a larger mem_fraction_static"
            )
        self._ranks = ranks
        self._target = target
        self._pool = NumberPool(ready.num_slots)
        self._rows = NumberPool(ready.num_rows)
        self._sessions: dict[SessionId, Session] = {}
        self.positions_computed = 0
        self.padding_computed = 0
        self.num_missed_graphs = 0

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
        """Token positions for which KV memory is free."""
        return self._pool.num_free

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
        """Make room for a session. Computes nothing yet, and shares nothing with other sessions: returns 0.

        Raises ValueError for a wrong prompt or count, Unsupported for features where none are tapped, KvExhausted without
        room.
        """
        if session in self._sessions:
            raise ValueError(f"session {session} is open already")
        token_ids = tuple(prompt)
        if wants_features and not self._target.tapped_layers:
            raise Unsupported("this target gives no context features: it was started without a feature projection")
        check_open(self._target, token_ids, sampling, num_output_tokens, num_node_probabilities)
        self._check_room(session, len(token_ids) + self._target.max_tree_nodes, self._pool.num_free)
        if not self._rows.num_free:
            raise KvExhausted(session, 1, 0, self._rows.size)
        (row,) = self._rows.take(1)
        self._sessions[session] = Session(
            row=row,
            prompt=token_ids,
            sampling=sampling,
            num_node_probabilities=num_node_probabilities,
            slots=self._pool.take(len(token_ids)),
            history=History(token_ids, num_output_tokens),
            wants_features=wants_features,
        )
        return 0

    def step(self, work: Sequence[PrefillChunk | Scoring]) -> Sequence[Posterior]:
        """Run the chunks of any sessions in one forward and their trees in another; one posterior each, in order."""
        self._check_work(work)
        if not work:
            return []
        parts = [self._part(item) for item in work]
        masks = {number: item.masks for number, item in enumerate(work) if item.masks is not None and parts[number].is_masked}
        answer: StepAnswer = self._ranks.step(StepCommand(tuple(parts)), masks)
        for item, part in zip(work, parts, strict=True):
            self._sessions[item.session].computed(part)
        self._count(parts, answer)
        return [
            replace(posterior, distributions=RankDistributions(self._ranks, number)) if posterior.token_ids else posterior
            for number, posterior in enumerate(answer.posteriors)
        ]

    def keep(self, session: SessionId, acceptance: Acceptance) -> None:
        """Of the session's last tree keep the accepted nodes' state; the rest is gone. Computes and moves nothing."""
        self._opened(session).keep(acceptance, self._pool)

    def release(self, session: SessionId) -> None:
        """Free everything the session holds. An unknown session is no error."""
        released = self._sessions.pop(session, None)
        if released is not None:
            released.release(self._pool)
            self._rows.give_back([released.row])

    def _check_room(self, session: SessionId, num_needed: int, num_free: int) -> None:
        if num_needed > num_free:
            raise KvExhausted(session, num_needed, num_free, self._pool.size)

    def _check_work(self, work: Sequence[PrefillChunk | Scoring]) -> None:
        """Refuse what cannot be done, before anything changes."""
        seen: set[SessionId] = set()
        num_free = self._pool.num_free
        for item in work:
            if item.session in seen:
                raise ValueError(f"session {item.session} has two items in one step")
            seen.add(item.session)
            opened = self._opened(item.session)
            try:
                opened.check(item, self._target)
            except ValueError as error:
                raise ValueError(f"session {item.session}: {error}") from error
            if isinstance(item, Scoring):
                self._check_room(item.session, len(item.tree), num_free)
                num_free -= len(item.tree)

    def _opened(self, session: SessionId) -> Session:
        if session not in self._sessions:
            raise ValueError(f"session {session} is not open")
        return self._sessions[session]

    def _part(self, item: PrefillChunk | Scoring) -> Part:
        session = self._sessions[item.session]
        part = session.chunk_part(item) if isinstance(item, PrefillChunk) else session.tree_part(item.tree, self._pool)
        return replace(part, is_masked=item.masks is not None and part.num_choices > 0)

    def _count(self, parts: Sequence[Part], answer: StepAnswer) -> None:
        self.positions_computed += sum(len(part.token_ids) for part in parts)
        self.padding_computed += answer.num_padding
        if answer.missed_graph:
            self.num_missed_graphs += 1
            num_trees = sum(part.tree is not None for part in parts)
            _log.warning("a step of %d trees ran outside the CUDA graphs, %d steps so far", num_trees, self.num_missed_graphs)


class StartedSglang:
    """SGLang from the moment that its ranks are started: loading, then served, in the end stopped."""

    def __init__(self, options: SglangOptions, name: str, num_threads: int | None = None) -> None:
        self._options = options
        self._name = name
        self._traits = ModelTraits.read(options.model_path)
        check(options, self._traits)
        check_version()
        self.ranks = Ranks.start(run_plan, rank_plans(options, self._traits, num_threads))

    def load(self) -> SglangTarget:
        """The engine, once the model is loaded. Raises Unsupported with a reason, EngineLost if a rank ends."""
        ready: Ready = self.ranks.load()
        _log.info("sglang is ready: attention %s, KV slots %d", ready.attention_backend, ready.num_slots)
        return SglangTarget(self.ranks, ready, describe(self._options, self._traits, self._name))

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Have `on_lost` called with the reason, on another thread, when a rank is lost."""
        self.ranks.watch(on_lost)

    def stop(self) -> None:
        """End the ranks."""
        self.ranks.stop()


def describe(options: SglangOptions, traits: ModelTraits, name: str) -> Target:
    """What is served. The tokenizer's hash is empty, which is "unknown", where the model has no tokenizer.json."""
    projection = feature_projection(options.feature_projection) if options.feature_projection else None
    has_tokenizer = (options.model_path / "tokenizer.json").is_file()
    return Target(
        engine="sglang",
        model=name,
        vocabulary_size=traits.vocabulary_size,
        tokenizer_hash=vocabulary_hash(load_tokenizer(options.model_path)) if has_tokenizer else "",
        max_tree_nodes=options.largest_tree,
        max_context=options.context_of(traits),
        end_token_ids=end_token_ids_of(options.model_path),
        feature_size=projection.feature_size if projection else traits.hidden_size * len(options.tap_layers),
        tapped_layers=options.tapped_layers,
        feature_projection_hash=projection.hash if projection else "",
    )
