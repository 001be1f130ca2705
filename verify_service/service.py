"""This file is the verify service over gRPC: streams in, work for the engine thread, answers out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from treewire import __version__, errors, wire
from treewire.core.acceptance import Acceptance
from treewire.core.budget import StepPrice
from treewire.core.tree import Commit, DraftTree, TokenLogProbs
from treewire.errors import InvalidRequest, Overloaded
from treewire.kv.pages import KvExhausted
from treewire.runtime.engine_thread import EngineThread
from treewire.runtime.metrics import VerifyMetrics
from treewire.v1 import tree_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine import Posterior, PrefillChunk, Scoring, Target, Unsupported
from verify_service.sessions import Opening, VerifySession, fingerprint
from verify_service.step import Answer, Step, Work
from verify_service.structures.grammars import Grammars
from verify_service.structures.pruning import Pruning

_OVERLOAD_RETRY_SECONDS = 1.0


class VerifyService(verify_pb2_grpc.VerifyServiceServicer):
    """Scores the trees of many sessions in common steps of one target engine."""

    def __init__(
        self,
        step: Step,
        thread: EngineThread[Work, Answer],
        metrics: VerifyMetrics,
        grammars: Grammars,
        *,
        max_sessions: int,
        prefill_chunk_tokens: int,
    ) -> None:
        self._step = step
        self._thread = thread
        self._metrics = metrics
        self._grammars = grammars
        self._max_sessions = max_sessions
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._sessions: set[int] = set()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open now."""
        return len(self._sessions)

    async def Verify(  # noqa: N802 - named by the contract
        self, requests: AsyncIterator[verify_pb2.VerifyRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verify_pb2.VerifyResponse]:
        """One session: open, prefill, then a scored for each tree, until the stream ends."""
        session = VerifySession(self._step.engine.target, await self._opening(requests))
        self._admit(session)
        try:
            if session.opening.structure is not None:
                session.matching = await self._grammars.matching(session.opening.structure, session.opening.output)
            num_known = session.num_features = await self._thread.call(partial(self._open, session))
            yield verify_pb2.VerifyResponse(accepted_open=self._limits())
            async for response in self._prefill(session, num_known):
                yield response
            async for request in requests:
                for response in await self._answer(session, request):
                    yield response
        finally:
            self._release(session)

    async def GetTarget(  # noqa: N802 - named by the contract
        self, request: verify_pb2.GetTargetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verify_pb2.GetTargetResponse:
        """What the target is."""
        return verify_pb2.GetTargetResponse(
            protocol_version=wire.PROTOCOL_VERSION,
            limits=self._limits(),
            num_sessions=self.num_sessions,
            version=__version__,
        )

    def _limits(self) -> verify_pb2.VerifyLimits:
        return limits(self._step.engine.target, self._step.prices)

    async def _opening(self, requests: AsyncIterator[verify_pb2.VerifyRequest]) -> Opening:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("event") != "open":
            raise InvalidRequest("the first message of a session is open")
        return Opening.from_message(first.open, self._step.engine.target)

    def _admit(self, session: VerifySession) -> None:
        if len(self._sessions) >= self._max_sessions:
            raise Overloaded(
                f"{len(self._sessions)} sessions are open, this service takes {self._max_sessions}",
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )
        self._sessions.add(session.id)
        self._metrics.sessions.set(len(self._sessions))

    def _open(self, session: VerifySession) -> int:
        """How many of the prompt's tokens the engine has already."""
        opening = session.opening
        try:
            return self._step.engine.open(
                session.id,
                opening.prompt,
                opening.sampling,
                num_output_tokens=opening.num_output_tokens,
                num_node_probabilities=opening.num_node_probabilities,
                wants_features=opening.wants_features,
                first_feature_position=opening.first_feature_position,
            )
        except Unsupported as error:
            raise errors.Unsupported(str(error)) from error
        except KvExhausted as error:
            if error.num_needed > error.num_slots:
                message = f"the session needs {error.num_needed} KV slots, this target has {error.num_slots}"
                raise InvalidRequest(message, metadata={"field": "prompt", "limit": str(error.num_slots)}) from error
            raise Overloaded(str(error), retry_after_seconds=_OVERLOAD_RETRY_SECONDS) from error

    def _release(self, session: VerifySession) -> None:
        self._sessions.discard(session.id)
        self._metrics.sessions.set(len(self._sessions))
        self._thread.post(partial(self._step.engine.release, session.id))

    async def _prefill(self, session: VerifySession, num_known: int) -> AsyncIterator[verify_pb2.VerifyResponse]:
        """The features of each chunk, where wanted, as soon as it is computed; at the end the first token."""
        prompt, size = session.opening.prompt, self._prefill_chunk_tokens
        for start in range(num_known, len(prompt), size):
            is_last = start + size >= len(prompt)
            masks = session.matching.masks(None) if session.matching is not None and is_last else None
            chunk = PrefillChunk(session.id, prompt[start : start + size], is_last, masks)
            answer = await self._thread.submit(Work(chunk, num_log_probs=session.opening.num_log_probs))
            if masks is not None:
                masks.check()
            for response in _feature_responses(session, answer.posterior.features, last=chunk.last):
                yield response
        if session.opening.caller_accepts:
            session.tree_to_keep = DraftTree.lone_root(prompt[-1])
            yield verify_pb2.VerifyResponse(scored=scored_to_message(answer))
        else:
            commit = await _committed(session, answer.posterior.token_ids, answer.log_probs)
            yield verify_pb2.VerifyResponse(commit=wire.commit_to_message(commit))

    async def _answer(self, session: VerifySession, request: verify_pb2.VerifyRequest) -> Sequence[verify_pb2.VerifyResponse]:
        match request.WhichOneof("event"):
            case "tree":
                return await self._score(session, request.tree)
            case "keep":
                return await self._keep(session, request.keep)
            case "open":
                raise InvalidRequest("the session is open already")
            case _:
                raise InvalidRequest("a message of a session has a tree or a keep")

    async def _score(self, session: VerifySession, message: tree_pb2.DraftTree) -> Sequence[verify_pb2.VerifyResponse]:
        """The answer to a tree, behind the features of what it commits."""
        started = time.perf_counter()
        tree = session.tree_from_message(message)
        decoded = time.perf_counter()
        pruning = None
        if session.matching is not None:  # a caller that accepts knows the nodes that it sent, none are grafted for it
            deepest = 0 if session.rule is None else self._step.engine.target.max_context - session.length
            pruning = await session.matching.pruned(tree, deepest)
        left = tree if pruning is None else pruning.left
        masks = None if session.matching is None else session.matching.masks(left)
        work = Work(Scoring(session.id, left, masks), session.rule, session.opening.num_log_probs, pruning)
        pruned = time.perf_counter()
        answer = await self._thread.submit(work)
        answered = time.perf_counter()
        if masks is not None:
            masks.check()
        responses = await self._scored(session, tree, answer, pruning)
        scored = responses[-1].scored
        scored.stage_seconds["decode"] = decoded - started
        if pruning is not None:
            scored.stage_seconds["prune"] = pruned - decoded
        scored.stage_seconds["queue"] = max(0.0, answered - pruned - answer.step_seconds - answer.walk_seconds)
        scored.stage_seconds["walk"] = answer.walk_seconds
        if session.prices_are_old(answered):
            scored.prices.extend(_prices_to_messages(self._step.prices))
        scored.stage_seconds["encode"] = time.perf_counter() - answered
        return responses

    async def _scored(
        self, session: VerifySession, tree: DraftTree, answer: Answer, pruning: Pruning | None
    ) -> Sequence[verify_pb2.VerifyResponse]:
        scored = scored_to_message(answer)
        if pruning is not None:
            tree = pruning.tree
            scored.grafted_token_ids.extend(tree.token_ids[pruning.num_sent :])
            scored.grafted_parents.extend(tree.parents[pruning.num_sent :])
        if answer.acceptance is None:
            session.tree_to_keep, session.features_to_keep = tree, answer.posterior.features
            session.pruning_to_keep = pruning
            return [verify_pb2.VerifyResponse(scored=scored)]
        features = _features_of(answer.posterior.features, answer.acceptance)
        commit = await _committed(session, answer.acceptance.token_ids(tree), answer.log_probs)
        scored.commit.CopyFrom(wire.commit_to_message(commit))
        return [*_feature_responses(session, features, last=True), verify_pb2.VerifyResponse(scored=scored)]

    async def _keep(self, session: VerifySession, message: verify_pb2.Keep) -> Sequence[verify_pb2.VerifyResponse]:
        """The features of what the caller keeps, where wanted. The prefill's own rows are kept, and sent, already."""
        tree, acceptance = session.acceptance_from_message(message)
        features, kept = _features_of(session.features_to_keep, acceptance), session.kept(acceptance)
        is_after_tree = session.root_token_id is not None
        await _committed(session, acceptance.token_ids(tree))
        if is_after_tree:
            await self._thread.call(partial(self._step.engine.keep, session.id, kept))
        return _feature_responses(session, features, last=True)


async def _committed(session: VerifySession, token_ids: tuple[int, ...], log_probs: tuple[TokenLogProbs, ...] = ()) -> Commit:
    """The tokens, committed; InvalidRequest, and nothing is, if they do not match the session's structure."""
    if session.matching is not None:
        await session.matching.advance(token_ids)
    return session.commit(token_ids, log_probs)


def _features_of(features: NDArray[np.float32] | None, acceptance: Acceptance) -> NDArray[np.float32] | None:
    """Of the features of all nodes those of the accepted ones."""
    return None if features is None else features[list(acceptance.nodes)]


def _feature_responses(
    session: VerifySession, features: NDArray[np.float32] | None, *, last: bool
) -> list[verify_pb2.VerifyResponse]:
    if features is None:
        return []
    return [verify_pb2.VerifyResponse(features=message) for message in session.features_to_messages(features, last=last)]


def limits(target: Target, prices: Sequence[StepPrice] = ()) -> verify_pb2.VerifyLimits:
    """What a session of this target is granted, and what its steps take."""
    return verify_pb2.VerifyLimits(
        max_tree_nodes=target.max_tree_nodes,
        max_context=target.max_context,
        fingerprint=fingerprint(target),
        end_token_ids=target.end_token_ids,
        engine=target.engine,
        prices=_prices_to_messages(prices),
    )


def _prices_to_messages(prices: Sequence[StepPrice]) -> list[verify_pb2.StepPrice]:
    return [
        verify_pb2.StepPrice(num_nodes=price.num_nodes, batch_size=price.batch_size, seconds=price.seconds) for price in prices
    ]


def scored_to_message(answer: Answer) -> verify_pb2.Scored:
    """The answer to a tree, without its commit."""
    return verify_pb2.Scored(
        posterior=answer.posterior.token_ids,
        accepted_nodes=answer.acceptance.nodes if answer.acceptance else (),
        node_probabilities=_node_probabilities(answer.posterior),
        step_seconds=answer.step_seconds,
        batch_size=answer.batch_size,
    )


def _node_probabilities(posterior: Posterior) -> list[verify_pb2.NodeProbabilities]:
    return [
        verify_pb2.NodeProbabilities(token_ids=node.token_ids, log_probs=node.log_probs)
        for node in posterior.node_probabilities
    ]
