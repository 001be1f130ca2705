"""Every RPC of every service: strangers, messages that are none and messages too large get the right code, and it lives."""

from __future__ import annotations

import grpc
import pytest

from tests.doors.test_fuzz import RPCS, answers
from tests.system.local_stack import LocalStack, local_stack
from treewire import AsyncClient
from treewire.errors import Unauthenticated, from_rpc_error
from treewire.runtime.channel import open_channel

TOKEN = "s3cret"
LARGEST_BYTES = 1 << 16
PATHS = [(service, path, shape) for service, path, _, shape in RPCS]


def address_of(stack: LocalStack, service: str) -> str:
    """Where the service listens."""
    assert stack.draft_running is not None
    return {
        "gateway": stack.address,
        "verify": stack.verify_running.address,
        "draft": stack.draft_running.address,
    }[service]


async def refused(channel: grpc.aio.Channel, shape: str, path: str, message: bytes) -> grpc.aio.AioRpcError:
    """What the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in answers(channel, shape, path, [message])]
    return caught.value


@pytest.mark.parametrize(("service", "path", "shape"), PATHS, ids=[path for _, path, _ in PATHS])
async def test_what_is_wrong_is_refused_with_the_right_code(service: str, path: str, shape: str) -> None:
    """UNAUTHENTICATED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED; a generation passes through the three services afterwards."""
    limits = {"token": TOKEN, "max_message_bytes": LARGEST_BYTES}
    async with local_stack(verify=limits, draft=limits, **limits) as stack:
        address = address_of(stack, service)
        for token in (None, "wrong"):
            async with open_channel(address, token=token) as channel:
                error = from_rpc_error(await refused(channel, shape, path, b""))
                assert isinstance(error, Unauthenticated)
                assert error.request_id
        async with open_channel(address, token=TOKEN) as channel:
            malformed = await refused(channel, shape, path, b"\xff\xff")
            assert malformed.code() is grpc.StatusCode.INVALID_ARGUMENT
            too_large = await refused(channel, shape, path, b"\x0a" + bytes(2 * LARGEST_BYTES))
            assert too_large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with AsyncClient(stack.address, token=TOKEN) as client:
            generation = await client.generate("Hi", max_tokens=5, ignore_end=True)
        assert generation.statistics.draft_tokens > 0
