"""The target on static buffers through the service: its step accepts where the service would, and nowhere else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.engines.target_contract import continuation
from tests.engines.test_walk import tree_around
from tests.engines.tiny_models import save_tiny_model
from tests.system.local_stack import verify_server
from treewire import wire
from treewire.core.acceptance import accept
from treewire.core.sampling import Sampling
from treewire.v1 import tree_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine import Posterior, Scoring
from verify_service.engines.transformers import TransformersTarget

PROMPT = (3, 1, 4, 1, 5)
SEEDED = Sampling(temperature=1.2, seed=8)
SIZES: dict[str, Any] = {"max_tree_nodes": 24, "max_context": 96, "kv_tokens": 512, "kv_page_size": 8}
NUM_ROUNDS = 6


class Watched(TransformersTarget):
    """Notes for each tree whether the step accepted of it."""

    accepted_in_step: list[bool]

    def step(self, work: Any) -> Any:
        """The step itself."""
        posteriors: list[Posterior] = list(super().step(work))
        for item, posterior in zip(work, posteriors, strict=True):
            if isinstance(item, Scoring) and item.session:  # session 0 warms up
                self.accepted_in_step.append(posterior.acceptance is not None)
        return posteriors


@pytest.mark.parametrize("accept_by", [tree_pb2.ACCEPTANCE_UNSPECIFIED, tree_pb2.ACCEPTANCE_CALLER, tree_pb2.ACCEPTANCE_HYBRID])
async def test_the_step_accepts_by_the_services_own_rule_alone(
    tmp_path: Path, accept_by: tree_pb2.Acceptance.ValueType
) -> None:
    """Shared noise is accepted in the step, callers' and hybrid sessions are not; the text is the same, in pages of 8."""
    folder = save_tiny_model(tmp_path, "qwen3", head_dim=16)
    text = continuation(TransformersTarget.load(folder, graphs="off", **SIZES), 1, PROMPT, 40, SEEDED)
    target = Watched.load(folder, graphs="on", **SIZES)
    assert isinstance(target, Watched)
    target.accepted_in_step = []
    rng, num_committed = random.Random(7), 1
    async with verify_server(target) as (running, _), grpc.aio.insecure_channel(running.address) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        opening = verify_pb2.VerifyOpen(
            protocol_version=wire.PROTOCOL_VERSION,
            prompt_token_ids=wire.token_ids_to_bytes(PROMPT),
            sampling=wire.sampling_to_message(SEEDED),
            accept=accept_by,
        )
        await call.write(verify_pb2.VerifyRequest(open=opening))
        while (await call.read()).WhichOneof("event") not in ("scored", "commit"):
            pass
        if accept_by == tree_pb2.ACCEPTANCE_CALLER:
            await call.write(verify_pb2.VerifyRequest(keep=verify_pb2.Keep(nodes=[0], next_token_id=text[0])))
        for number in range(NUM_ROUNDS):
            tree = tree_around(text[num_committed - 1 : num_committed + 1 + number % 4], rng)
            await call.write(verify_pb2.VerifyRequest(tree=wire.tree_to_message(tree)))
            scored = (await call.read()).scored
            acceptance = accept(tree, tuple(scored.posterior))
            token_ids = acceptance.token_ids(tree)
            if accept_by == tree_pb2.ACCEPTANCE_CALLER:
                keep = verify_pb2.Keep(nodes=acceptance.nodes, next_token_id=acceptance.next_token_id)
                await call.write(verify_pb2.VerifyRequest(keep=keep))
            else:
                size = target.target.vocabulary_size
                committed = wire.commit_from_message(
                    scored.commit, previous_length=len(PROMPT) + num_committed, vocabulary_size=size
                )
                assert committed.token_ids == token_ids
            assert list(token_ids) == text[num_committed : num_committed + len(token_ids)]
            num_committed += len(token_ids)
        call.cancel()
    assert target.accepted_in_step == [accept_by == tree_pb2.ACCEPTANCE_UNSPECIFIED] * NUM_ROUNDS
