"""Sessions of the verify service that are driven without a gateway: the caller accepts, or brings drawn nodes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from examples import typical_acceptance
from examples.typical_acceptance import TypicalRule
from gateway.tokenization import Tokenization
from tests.system.local_stack import MODEL, local_stack, verify_server
from treewire import wire
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree, Draw
from treewire.errors import Incompatible, InvalidRequest, Unsupported, from_rpc_error
from treewire.v1 import tree_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engine import PrefillChunk
from verify_service.engines.simulated import SimulatedTarget

PROMPT = (5, 300, 301, 302)
SAMPLED = Sampling(temperature=1.0, seed=3)


class Raw:
    """A session in bare messages."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **event: Any) -> None:
        await self.call.write(verify_pb2.VerifyRequest(**event))

    async def read(self) -> verify_pb2.VerifyResponse:
        try:
            response: verify_pb2.VerifyResponse = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response

    async def answer(self, **event: Any) -> verify_pb2.VerifyResponse:
        await self.send(**event)
        return await self.read()


@asynccontextmanager
async def session(accept: tree_pb2.Acceptance.ValueType, **options: Any) -> AsyncIterator[Raw]:
    """An open session on a simulated target of its own."""
    async with (
        verify_server(SimulatedTarget(MODEL)) as (running, _),
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        raw = Raw(verify_pb2_grpc.VerifyServiceStub(channel).Verify())
        opening = verify_pb2.VerifyOpen(
            protocol_version=wire.PROTOCOL_VERSION,
            prompt_token_ids=wire.token_ids_to_bytes(PROMPT),
            sampling=wire.sampling_to_message(SAMPLED),
            accept=accept,
            **options,
        )
        assert (await raw.answer(open=opening)).HasField("accepted_open")
        yield raw
        raw.call.cancel()


async def test_caller_accepts_what_it_likes() -> None:
    """The service scores and waits for keep; what is kept becomes the prefix, against the target's choice too."""
    async with session(tree_pb2.ACCEPTANCE_CALLER, num_node_probabilities=3) as raw:
        first = (await raw.read()).scored
        assert len(first.posterior) == 1
        assert not first.HasField("commit")
        assert [len(node.token_ids) for node in first.node_probabilities] == [3]
        await raw.send(keep=verify_pb2.Keep(nodes=[0], next_token_id=310))
        scored = (await raw.answer(tree=tree_pb2.DraftTree(token_ids=[310, 320, 330], parents=[-1, 0, 1]))).scored
        assert not scored.accepted_nodes
        assert len(scored.posterior) == len(scored.node_probabilities) == 3
        await raw.send(keep=verify_pb2.Keep(nodes=[0, 1, 2], next_token_id=340))
        kept = (await raw.answer(tree=tree_pb2.DraftTree(token_ids=[340], parents=[-1]))).scored
    async with verify_server(SimulatedTarget(MODEL)) as (running, process):
        assert running.address
        engine = process.step.engine
        engine.open(99, (*PROMPT, 310, 320, 330, 340), SAMPLED)
        (posterior,) = engine.step([PrefillChunk(99, (*PROMPT, 310, 320, 330, 340), last=True)])
    assert list(kept.posterior) == list(posterior.token_ids)


async def test_caller_out_of_turn_is_refused() -> None:
    """A tree before keep, a keep that is no path, and keep where the service accepts are errors by name."""
    async with session(tree_pb2.ACCEPTANCE_CALLER) as raw:
        await raw.read()
        with pytest.raises(Incompatible, match="send keep before"):
            await raw.answer(tree=tree_pb2.DraftTree(token_ids=[1], parents=[-1]))
    async with session(tree_pb2.ACCEPTANCE_CALLER) as raw:
        await raw.read()
        with pytest.raises(InvalidRequest, match="no path"):
            await raw.answer(keep=verify_pb2.Keep(nodes=[1], next_token_id=3))
    async with session(tree_pb2.ACCEPTANCE_SHARED_NOISE) as raw:
        await raw.read()
        with pytest.raises(Incompatible, match="keep without"):
            await raw.answer(keep=verify_pb2.Keep(nodes=[0], next_token_id=3))


REGEX = "[0-9]{5}( oak| ash)"
FORBIDDEN = Tokenization.simulated().encode("tree", False)[0]
DIGITS = [Tokenization.simulated().encode(digit, False)[0] for digit in "0123456789"]


async def test_caller_accepts_within_a_structure() -> None:
    """Choices and node probabilities are of what the structure allows; forbidden nodes are not computed. What is kept of them
    follows the structure to its end, several tokens at once."""
    tokenization, output, most_kept = Tokenization.simulated(), list[int](), 0
    async with session(tree_pb2.ACCEPTANCE_CALLER, num_node_probabilities=4, regex=REGEX) as raw:
        scored = (await raw.read()).scored
        nodes = [0]
        while True:
            likeliest = [token_id for node in nodes for token_id in scored.node_probabilities[node].token_ids]
            pieces = [tokenization.piece(token_id) for token_id in likeliest if token_id != MODEL.end_token_id]
            assert set("".join(pieces)) <= set("0123456789 oaksh")
            next_token_id = scored.posterior[nodes[-1]]
            await raw.send(keep=verify_pb2.Keep(nodes=nodes, next_token_id=next_token_id))
            output.append(next_token_id)
            if next_token_id == MODEL.end_token_id:
                break
            tokens = [output[-1], FORBIDDEN, *DIGITS, DIGITS[0]]
            parents = [-1, 0, *[0] * len(DIGITS), 1]
            scored = (await raw.answer(tree=tree_pb2.DraftTree(token_ids=tokens, parents=parents))).scored
            assert [scored.posterior[node] for node in (1, len(tokens) - 1)] == [-1, -1]
            assert not scored.node_probabilities[1].token_ids
            nodes = [0, *(node for node in range(2, len(tokens) - 1) if tokens[node] == scored.posterior[0])]
            output += [tokens[node] for node in nodes[1:]]
            most_kept = max(most_kept, len(nodes))
    assert re.fullmatch(REGEX, "".join(map(tokenization.piece, output[:-1])))
    assert most_kept == 2


@pytest.mark.parametrize(
    ("nodes", "next_token_id", "reason"),
    [([0, 1], DIGITS[0], "node 1 is forbidden by the structure"), ([0], FORBIDDEN, "does not match the structure")],
)
async def test_caller_cannot_keep_what_the_structure_forbids(nodes: list[int], next_token_id: int, reason: str) -> None:
    """Neither a node nor the token behind the last one."""
    async with session(tree_pb2.ACCEPTANCE_CALLER, regex=REGEX) as raw:
        root = (await raw.read()).scored.posterior[0]
        await raw.send(keep=verify_pb2.Keep(nodes=[0], next_token_id=root))
        await raw.answer(tree=tree_pb2.DraftTree(token_ids=[root, FORBIDDEN], parents=[-1, 0]))
        with pytest.raises(InvalidRequest, match=reason):
            await raw.answer(keep=verify_pb2.Keep(nodes=nodes, next_token_id=next_token_id))


async def test_caller_is_refused_log_probs() -> None:
    """They go with tokens that the service commits."""
    with pytest.raises(Unsupported, match="num_log_probs"):
        async with session(tree_pb2.ACCEPTANCE_CALLER, num_log_probs=1):
            pass


async def test_drawn_nodes_are_for_hybrid_sessions() -> None:
    """A drawn node is taken with ACCEPTANCE_HYBRID, checked there, and refused elsewhere."""
    for accept, message in (
        (tree_pb2.ACCEPTANCE_SHARED_NOISE, "only sessions opened with ACCEPTANCE_HYBRID"),
        (tree_pb2.ACCEPTANCE_HYBRID, "which its draw cannot give"),
    ):
        async with session(accept) as raw:
            root = (await raw.read()).commit.token_ids[-1]
            tree = wire.tree_to_message(DraftTree((root, 300), (-1, 0), (Draw(1, (300, 301), (-0.5, -1.0)),)))
            if accept == tree_pb2.ACCEPTANCE_HYBRID:
                tree.token_ids[1] = 302
            with pytest.raises(InvalidRequest, match=message):
                await raw.answer(tree=tree)
    async with session(tree_pb2.ACCEPTANCE_HYBRID) as raw:
        commit = (await raw.read()).commit
        tree = wire.tree_to_message(DraftTree((commit.token_ids[-1], 300), (-1, 0), (Draw(1, (300, 301), (-0.5, -1.0)),)))
        scored = (await raw.answer(tree=tree)).scored
        assert scored.commit.length == commit.length + len(scored.commit.token_ids)


async def test_typical_acceptance_outside_of_the_service() -> None:
    """The example generates with fewer rounds than tokens; with a floor of 1 and no share it takes only near-certain drafts."""
    async with local_stack() as stack:
        assert stack.draft_running is not None
        addresses = stack.verify_running.address, stack.draft_running.address
        output, num_rounds = await typical_acceptance.generate(*addresses, PROMPT, max_tokens=60, sampling=SAMPLED)
        strict, num_strict_rounds = await typical_acceptance.generate(
            *addresses, PROMPT, max_tokens=60, sampling=SAMPLED, rule=TypicalRule(floor=1.0, share=1e9)
        )
    assert len(output) >= 60
    assert num_rounds < 40
    assert num_rounds < num_strict_rounds <= len(strict)
