"""The choice among replicas: by health, by load, by prefix; and names that stand for several."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.replicas import Replicas
from gateway.settings import GatewaySettings
from treewire.errors import Unavailable
from treewire.runtime.channel import open_channel

SERVICE = "toy"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Toy:
    """A server that has health and nothing else."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1", servicer: health.aio.HealthServicer | None = None) -> None:
        self.health = servicer or health.aio.HealthServicer()
        self._server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"

    async def start(self) -> None:
        await self.health.set(SERVICE, SERVING)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)


@asynccontextmanager
async def watched(*addresses: str) -> AsyncIterator[Replicas]:
    replicas = Replicas(addresses, SERVICE, lambda location: open_channel(location.address))
    async with replicas.watched():
        yield replicas


@asynccontextmanager
async def toys(count: int) -> AsyncIterator[list[Toy]]:
    servers = [Toy() for _ in range(count)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


async def available(replicas: Replicas, count: int) -> None:
    """Returns when so many replicas take sessions."""
    async with asyncio.timeout(20):
        while replicas.num_available != count:
            await asyncio.sleep(0.01)


async def test_replica_leaves_and_comes_back_with_its_health() -> None:
    """NOT_SERVING and a broken connection take a replica out, SERVING brings it back; without any, choosing is Unavailable."""
    async with toys(2) as (first, second), watched(first.address, second.address) as replicas:
        await available(replicas, 2)
        await first.health.set(SERVICE, NOT_SERVING)
        await available(replicas, 1)
        assert {replicas.choose().address for _ in range(20)} == {second.address}
        assert [replica.is_draining for replica in replicas.all if replica.address == first.address] == [True]
        await first.health.set(SERVICE, SERVING)
        await available(replicas, 2)
        await second.stop()
        await available(replicas, 1)
        await first.stop()
        await available(replicas, 0)
        with pytest.raises(Unavailable, match="none of 2 replicas of toy is serving"):
            replicas.choose()
        with pytest.raises(Unavailable):
            await replicas.wait_available(0.01)
        revived = Toy(int(first.address.rpartition(":")[2]))
        await revived.start()
        await replicas.wait_available(20)
        await revived.stop()


async def test_the_least_loaded_replica_is_chosen() -> None:
    """Sessions spread evenly, and a session that ends makes room."""
    async with toys(3) as servers, watched(*(server.address for server in servers)) as replicas:
        await available(replicas, 3)
        open_sessions = []
        for _ in range(9):
            session = replicas.choose().session()
            session.__enter__()
            open_sessions.append(session)
        assert [replica.num_sessions for replica in replicas.all] == [3, 3, 3]
        for session in open_sessions:
            session.__exit__(None, None, None)
        assert [replica.num_sessions for replica in replicas.all] == [0, 0, 0]


async def test_a_prefix_keeps_its_replica_unless_that_has_more_than_its_share() -> None:
    """Same first tokens, same replica; different ones spread; a replica above its share is not preferred; one that is to be
    avoided neither."""
    async with toys(3) as servers, watched(*(server.address for server in servers)) as replicas:
        await available(replicas, 3)
        prefixes = [tuple(range(number, number + 80)) for number in range(60)]
        preferred = [replicas.choose(prefix) for prefix in prefixes]
        assert preferred == [replicas.choose((*prefix[:64], 7)) for prefix in prefixes]
        assert min(Counter(preferred).values()) > 5
        favourite = replicas.choose(prefixes[0])
        assert replicas.choose(prefixes[0], avoid={favourite}) is not favourite
        with favourite.session(), favourite.session():
            assert replicas.choose(prefixes[0]) is not favourite
            assert replicas.choose(prefixes[0], avoid=set(replicas.all)) is not None


async def test_replica_that_does_not_fit_is_left_out_until_its_health_changes() -> None:
    """A drafter of another vocabulary is not asked again, unless it was restarted, perhaps as another one."""
    async with toys(1) as (server,), watched(server.address) as replicas:
        await available(replicas, 1)
        replicas.choose().refuse()
        assert replicas.num_available == 0
        await server.health.set(SERVICE, NOT_SERVING)
        async with asyncio.timeout(20):
            while not replicas.all[0].is_draining:
                await asyncio.sleep(0.01)
        await server.health.set(SERVICE, SERVING)
        await available(replicas, 1)


async def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """dns:///name:port: every address is a replica; one that the name loses is left when its last session ends."""
    loop = asyncio.get_running_loop()
    found = ["127.0.0.1", "127.0.0.2"]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        assert host == "verify.internal"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("gateway.replicas._RESOLVE_SECONDS", 0.05)
    first = Toy()
    port = int(first.address.rpartition(":")[2])
    second = Toy(port, "127.0.0.2")
    await first.start()
    await second.start()
    async with watched(f"dns:///verify.internal:{port}") as replicas:
        await available(replicas, 2)
        assert {replica.address for replica in replicas.all} == {first.address, second.address}
        leaving = next(replica for replica in replicas.all if replica.address == second.address)
        with leaving.session():
            found.remove("127.0.0.2")
            await available(replicas, 1)
            assert replicas.choose().address == first.address
            assert leaving.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
        async with asyncio.timeout(20):
            while leaving.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0.01)
    await first.stop()
    await second.stop()


def test_settings_take_lists_and_names() -> None:
    """Comma lists, names, and for the drafter nothing at all; a gateway without a target is refused."""
    settings = GatewaySettings(verify="a:1, dns:///b:2", draft="")  # type: ignore[arg-type]
    assert settings.verify == ("a:1", "dns:///b:2")
    assert settings.draft == ()
    with pytest.raises(ValueError, match="verify is empty, a gateway needs a target"):
        GatewaySettings(verify="")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"b" is not an address'):
        GatewaySettings(verify="dns:///b")  # type: ignore[arg-type]


class SilentHealth(health.aio.HealthServicer):
    """Pushes what it is, and does not answer questions for as long as it is silent."""

    def __init__(self) -> None:
        super().__init__()
        self.speaking = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """Answers when it speaks again."""
        await self.speaking.wait()
        return await super().Check(request, context)


async def test_replica_that_does_not_answer_is_the_last_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped, or merely busy, replica is passed over for one that answers, and still taken where it is the only one."""
    monkeypatch.setattr("gateway.replicas._PULSE_SECONDS", 0.05)
    monkeypatch.setattr("gateway.replicas._PULSE_TIMEOUT_SECONDS", 0.05)
    silent = Toy(servicer=SilentHealth())
    assert isinstance(silent.health, SilentHealth)
    await silent.start()
    async with toys(1) as (other,), watched(silent.address, other.address) as replicas:
        await available(replicas, 2)
        async with asyncio.timeout(20):
            while all(replica.answers for replica in replicas.all):
                await asyncio.sleep(0.01)
        assert {replicas.choose((number,)).address for number in range(30)} == {other.address}
        answering = replicas.choose()
        assert not replicas.has_other(answering)
        assert replicas.choose(avoid={answering}) is answering
        await other.stop()
        await available(replicas, 1)
        assert replicas.choose().address == silent.address
        silent.health.speaking.set()
        async with asyncio.timeout(20):
            while not replicas.choose().answers:
                await asyncio.sleep(0.01)
    await silent.stop()
