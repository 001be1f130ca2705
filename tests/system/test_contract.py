"""The two session streams, spoken to directly: what is refused, with which status and words, and that the server lives on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from draft_service.engines.simulated import SimulatedDrafter
from tests.system.local_stack import MODEL, draft_server, verify_server
from treewire import wire
from treewire.core.tree import DraftTree
from treewire.errors import Incompatible, InvalidRequest, Overloaded, TreewireError, Unsupported, from_rpc_error
from treewire.runtime.channel import open_channel
from treewire.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc
from verify_service.engines.simulated import SimulatedTarget

PROMPT = (300, 301, 302)


def verify_open(**changes: Any) -> verify_pb2.VerifyRequest:
    """A sound open, changed."""
    fields = {"protocol_version": 1, "prompt_token_ids": wire.token_ids_to_bytes(PROMPT)}
    return verify_pb2.VerifyRequest(open=verify_pb2.VerifyOpen(**(fields | changes)))


def draft_open(**changes: Any) -> draft_pb2.DraftRequest:
    """A sound open, changed."""
    fields = {"protocol_version": 1, "prompt_token_ids": wire.token_ids_to_bytes(PROMPT), "horizon": 4, "width": 8}
    return draft_pb2.DraftRequest(open=draft_pb2.DraftOpen(**(fields | changes)))


@pytest.fixture
async def verify() -> AsyncIterator[verify_pb2_grpc.VerifyServiceAsyncStub]:
    """A verify service that takes trees of 64 nodes, a context of 50 and two sessions."""
    target = SimulatedTarget(MODEL, max_tree_nodes=64, max_context=50)
    async with verify_server(target, max_sessions=2) as (running, _), open_channel(running.address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        yield stub
        answers = await converse(stub.Verify, [verify_open()])
        assert [answer.WhichOneof("event") for answer in answers] == ["accepted_open", "commit"], "the server does not live on"


@pytest.fixture
async def draft() -> AsyncIterator[draft_pb2_grpc.DraftServiceAsyncStub]:
    """A draft service of a horizon of 7 and a context of 50."""
    async with draft_server(SimulatedDrafter(MODEL, max_context=50)) as (running, _), open_channel(running.address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        yield stub
        assert len(await converse(stub.Draft, [draft_open()])) == 1, "the server does not live on"


async def converse(method: Any, requests: Sequence[Any]) -> list[Any]:
    """Send these, half-close, and read everything. Raises our error for a failed call."""
    call = method(iter(requests))
    try:
        return [response async for response in call]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def tree(*token_ids: int) -> verify_pb2.VerifyRequest:
    """A chain."""
    chain = DraftTree(token_ids, tuple(range(-1, len(token_ids) - 1)))
    return verify_pb2.VerifyRequest(tree=wire.tree_to_message(chain))


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        ([tree(1)], InvalidRequest, "the first message of a session is open"),
        ([verify_pb2.VerifyRequest()], InvalidRequest, "the first message of a session is open"),
        ([verify_open(protocol_version=2)], Incompatible, "protocol version 2, this service speaks 1"),
        ([verify_open(prompt_token_ids=b"")], InvalidRequest, "prompt_token_ids has 0 tokens"),
        ([verify_open(prompt_token_ids=bytes(4 * 51))], InvalidRequest, "prompt_token_ids has 51 tokens, from 1 to 50"),
        ([verify_open(num_output_tokens=3)], InvalidRequest, "num_output_tokens is 3, from 0 to 2"),
        ([verify_open(num_node_probabilities=99)], InvalidRequest, "num_node_probabilities is 99, from 0 to 64"),
        ([verify_open(accept=77)], InvalidRequest, "accept is 77"),
        ([verify_open(sampling=tree_pb2.Sampling(top_p=2.0))], InvalidRequest, "top_p is 2.0, it must be from 0.0 to 1.0"),
        ([verify_open(target=tree_pb2.Fingerprint(vocabulary_size=5))], Incompatible, "vocabulary_size: 1024 for"),
        ([verify_open(), verify_open()], InvalidRequest, "the session is open already"),
        ([verify_open(), verify_pb2.VerifyRequest()], InvalidRequest, "a message of a session has a tree or a keep"),
        ([verify_open(), tree(7)], Incompatible, "tree has root 7, the last committed token is"),
        ([verify_open(), tree(*range(65))], InvalidRequest, "tree has 65 nodes, this target takes 64"),
        (
            [verify_open(), verify_pb2.VerifyRequest(keep=verify_pb2.Keep(nodes=[0]))],
            Incompatible,
            "keep without a scored tree",
        ),
    ],
)
async def test_verify_refuses(verify: Any, requests: Sequence[Any], error: type[TreewireError], message: str) -> None:
    """Out of order, out of range, or not of this target."""
    with pytest.raises(error, match=message):
        await converse(verify.Verify, requests)


async def test_26_tree_past_the_longest_context_is_refused_with_both_positions(verify: Any) -> None:
    """A tree may reach the last position of the context, and not the one behind it."""
    prompt = wire.token_ids_to_bytes([300] * 48)
    opened = await converse(verify.Verify, [verify_open(prompt_token_ids=prompt)])
    root = opened[1].commit.token_ids[0]
    answers = await converse(verify.Verify, [verify_open(prompt_token_ids=prompt), tree(root, 5)])
    assert answers[-1].WhichOneof("event") == "scored"
    with pytest.raises(InvalidRequest, match="tree reaches position 50, this target's last is 49"):
        await converse(verify.Verify, [verify_open(prompt_token_ids=prompt), tree(root, 5, 6)])


async def test_sessions_beyond_the_limit_are_overload(verify: Any) -> None:
    """The third session of two is turned away with a time to come back; the two go on."""
    calls = [verify.Verify() for _ in range(2)]
    for call in calls:
        await call.write(verify_open())
        assert (await call.read()).WhichOneof("event") == "accepted_open"
    with pytest.raises(Overloaded, match="2 sessions are open, this service takes 2") as caught:
        await converse(verify.Verify, [verify_open()])
    assert caught.value.retry_after_seconds
    for call in calls:
        assert (await call.read()).WhichOneof("event") == "commit"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        ([draft_pb2.DraftRequest()], InvalidRequest, "the first message of a session is open"),
        ([draft_open(protocol_version=0)], Incompatible, "protocol version 0"),
        ([draft_open(horizon=0)], InvalidRequest, "horizon is 0, at least 1 is taken"),
        ([draft_open(width=-1)], InvalidRequest, "width is -1, at least 1 is taken"),
        ([draft_open(prompt_token_ids=bytes(4 * 51))], InvalidRequest, "prompt_token_ids has 51 tokens, from 1 to 50"),
        ([draft_open(target=tree_pb2.Fingerprint(vocabulary_size=5))], Incompatible, "vocabulary_size: 1024 for"),
        ([draft_open(), draft_open()], InvalidRequest, "the session is open already"),
        (
            [draft_open(), draft_pb2.DraftRequest(commit=tree_pb2.Commit(token_ids=[400], length=9))],
            Incompatible,
            "commit ends at length 9, but 1 tokens after 3 end at 4",
        ),
        (
            [draft_open(), draft_pb2.DraftRequest(commit=tree_pb2.Commit(token_ids=[400] * 48, length=51))],
            InvalidRequest,
            "the sequence has 51 tokens, this drafter follows 50",
        ),
        ([draft_open(), draft_pb2.DraftRequest(features=tree_pb2.Features())], Unsupported, "features"),
    ],
)
async def test_draft_refuses(draft: Any, requests: Sequence[Any], error: type[TreewireError], message: str) -> None:
    """Out of order, out of range, or not for this target."""
    with pytest.raises(error, match=message):
        await converse(draft.Draft, requests)


async def test_draft_grants_no_more_than_it_can(draft: Any) -> None:
    """Horizon and width are the smaller of what is asked for and what there is, and the marginals keep to them."""
    commit = draft_pb2.DraftRequest(commit=tree_pb2.Commit(token_ids=[400], length=4))
    granted, answer = await converse(draft.Draft, [draft_open(horizon=99, width=3), commit])
    assert (granted.accepted_open.horizon, granted.accepted_open.width) == (7, 3)
    assert answer.marginals.last
    assert answer.marginals.width == 3
    assert len(answer.marginals.token_ids) == 7 * 3 * 4


async def test_choices_that_are_not_implemented_are_refused_by_name(verify: Any) -> None:
    """The contract names more than this version does: UNIMPLEMENTED, with the name."""
    with pytest.raises(Unsupported, match="features"):
        await converse(verify.Verify, [verify_open(features=True)])
