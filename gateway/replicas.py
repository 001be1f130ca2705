"""This file is the replicas of one service: found by list or by name, watched by their health, chosen by load and prefix."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treewire.errors import Unavailable
from treewire.runtime.endpoint import Endpoint
from treewire.runtime.logging import get_logger

DNS = "dns:///"
"""What an address begins with whose name stands for as many replicas as it has addresses."""

_NUM_PREFIX_TOKENS = 64
_LOAD_FACTOR = 1.25  # consistent hashing with bounded loads (Mirrokni, Thorup & Zadimoghaddam, arXiv 1608.01350)
_WATCH_AGAIN_SECONDS = 0.2
_PULSE_SECONDS = 1.0
_PULSE_TIMEOUT_SECONDS = 2.0
_RESOLVE_SECONDS = 5.0

_log = get_logger()


class Location(NamedTuple):
    """Where a replica listens. `server_name` is what its certificate names, where that is not the host of the address."""

    address: str
    server_name: str | None = None


class Health(Enum):
    """What a replica says of its service, if it says anything."""

    UNREACHABLE = "unreachable"
    NOT_SERVING = "not serving"
    SERVING = "serving"


class Replica:
    """One replica: its channel, its health, and the sessions that this gateway has on it."""

    def __init__(self, location: Location, channel: grpc.aio.Channel, service: str, on_change: Callable[[], None]) -> None:
        self.address = location.address
        self.channel = channel
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._on_change = on_change
        self._health = Health.UNREACHABLE
        self._answers = True
        self._fits = True
        self._num_sessions = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._left = asyncio.Event()

    @property
    def is_available(self) -> bool:
        """True if new sessions may be opened on it."""
        return self._health is Health.SERVING and self._fits

    @property
    def answers(self) -> bool:
        """False while it serves by its own word, and yet does not answer: stopped, cut off, or very busy."""
        return self._answers

    @property
    def is_draining(self) -> bool:
        """True if it answers, and takes no more: what runs there is to move."""
        return self._health is Health.NOT_SERVING

    @property
    def num_sessions(self) -> int:
        """Sessions of this gateway that are open on it."""
        return self._num_sessions

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count one session for as long as the block runs."""
        self._num_sessions += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_sessions -= 1
            if not self._num_sessions:
                self._idle.set()

    def refuse(self) -> None:
        """Leave it out until its health changes: it does not fit this gateway's target."""
        self._fits = False
        self._on_change()

    def leave(self) -> None:
        """Let its life end when this gateway has no session on it any more."""
        self._left.set()

    async def live(self) -> None:
        """Its life: watched until it was left and is idle, then its channel closes."""
        async with self.channel:
            watching = asyncio.create_task(self._watch())
            try:
                await self._left.wait()
                await self._idle.wait()
            finally:
                watching.cancel()

    async def _watch(self) -> None:
        """What it says of itself, and whether it still says anything."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(stub))
            tasks.create_task(self._feel_pulse(stub))

    async def _listen(self, stub: health_pb2_grpc.HealthStub) -> None:
        while True:
            call = stub.Watch(self._request, wait_for_ready=True)
            try:
                async for response in call:
                    serving = response.status == health_pb2.HealthCheckResponse.SERVING
                    self._set_health(Health.SERVING if serving else Health.NOT_SERVING)
            except grpc.aio.AioRpcError:
                pass  # told below, as is an orderly end
            finally:
                call.cancel()
            self._set_health(Health.UNREACHABLE)
            await asyncio.sleep(_WATCH_AGAIN_SECONDS)

    async def _feel_pulse(self, stub: health_pb2_grpc.HealthStub) -> None:
        """A process that is stopped keeps its connections: only asking shows it."""
        while True:
            await asyncio.sleep(_PULSE_SECONDS)
            if self._health is Health.UNREACHABLE:
                continue
            try:
                await stub.Check(self._request, timeout=_PULSE_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                self._answers = False
            else:
                self._answers = True

    def _set_health(self, health: Health) -> None:
        if health is self._health:
            return
        _log.info("replica", address=self.address, service=self._request.service, health=health.value)
        self._health, self._answers, self._fits = health, True, True
        self._on_change()


class Replicas:
    """All replicas of one service. Entering starts to watch them; leaving closes their channels.

    `addresses` are endpoints, or `dns:///name:port`, which is resolved again and again: what it no longer names takes no
    more sessions and is left when its last one ends.
    """

    def __init__(self, addresses: Sequence[str], service: str, open_channel: Callable[[Location], grpc.aio.Channel]) -> None:
        self._service = service
        self._open_channel = open_channel
        self._fixed = frozenset(Location(address) for address in addresses if not address.startswith(DNS))
        self._names = [Endpoint.parse(address.removeprefix(DNS)) for address in addresses if address.startswith(DNS)]
        self._resolved: dict[Endpoint, frozenset[Location]] = {}
        self._replicas: dict[Location, Replica] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._available = asyncio.Event()

    @property
    def all(self) -> Sequence[Replica]:
        """The replicas that are known now."""
        return tuple(self._replicas.values())

    @property
    def num_available(self) -> int:
        """Replicas that take sessions now."""
        return sum(replica.is_available for replica in self._replicas.values())

    def choose(self, prefix: Sequence[int] = (), avoid: Collection[Replica] = ()) -> Replica:
        """The replica for a new session: that of the prefix unless it is loaded above its share, else the least loaded one.

        One of `avoid` only if no other one answers, one that does not answer only if there is no other at all. Raises
        Unavailable if none is serving.
        """
        available = [replica for replica in self._replicas.values() if replica.is_available]
        if not available:
            raise Unavailable(f"none of {len(self._replicas)} replicas of {self._service} is serving", retry_after_seconds=1.0)
        candidates = _best(available, avoid)
        if prefix:
            preferred = _preferred(candidates, prefix)
            if preferred.num_sessions < _share(candidates):
                return preferred
        return min(candidates, key=lambda replica: (replica.num_sessions, random.random()))

    def has_other(self, than: Replica) -> bool:
        """True if a session could be opened on another replica."""
        return any(each.is_available and each.answers and each is not than for each in self._replicas.values())

    async def wait_available(self, timeout_seconds: float) -> None:
        """Return when a replica takes sessions. Raises Unavailable if none does in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._available.wait()
        except TimeoutError:
            self.choose()  # says what is missing

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Replicas]:
        """Watch the replicas for as long as the block runs."""
        self._update()
        resolving = [asyncio.create_task(self._resolve(name)) for name in self._names]
        try:
            yield self
        finally:
            tasks = [*resolving, *self._lives]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _resolve(self, name: Endpoint) -> None:
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
            except OSError as error:  # the name's last replica is gone, or its server is: what is known stays
                _log.debug("name does not resolve", name=str(name), reason=str(error))
            else:
                addresses = {str(address[0]) for *_, address in found}
                self._resolved[name] = frozenset(Location(str(Endpoint(each, name.port)), name.host) for each in addresses)
                self._update()
            await asyncio.sleep(_RESOLVE_SECONDS)

    def _update(self) -> None:
        """Begin to watch what is new, and leave what is gone."""
        wanted = self._fixed.union(*self._resolved.values())
        for location in self._replicas.keys() - wanted:
            self._replicas.pop(location).leave()
        for location in wanted - self._replicas.keys():
            replica = Replica(location, self._open_channel(location), self._service, self._changed)
            self._replicas[location] = replica
            life = asyncio.create_task(replica.live())
            self._lives.add(life)
            life.add_done_callback(self._lives.discard)
        self._changed()

    def _changed(self) -> None:
        if any(replica.is_available for replica in self._replicas.values()):
            self._available.set()
        else:
            self._available.clear()


def _best(available: Sequence[Replica], avoid: Collection[Replica]) -> Sequence[Replica]:
    """Those that answer, and of them those that are not to be avoided, as far as there are any."""
    answering = [replica for replica in available if replica.answers] or available
    return [replica for replica in answering if replica not in avoid] or answering


def _preferred(replicas: Sequence[Replica], prefix: Sequence[int]) -> Replica:
    """The one replica of these that every gateway prefers for the prefix (rendezvous hashing)."""
    beginning = ",".join(map(str, prefix[:_NUM_PREFIX_TOKENS])).encode()

    def weight(replica: Replica) -> bytes:
        return hashlib.blake2b(beginning, key=replica.address.encode()[:64], digest_size=8).digest()

    return max(replicas, key=weight)


def _share(replicas: Sequence[Replica]) -> int:
    """Sessions that one of these may have before its prefixes go elsewhere."""
    total = 1 + sum(replica.num_sessions for replica in replicas)
    return math.ceil(_LOAD_FACTOR * total / len(replicas))
