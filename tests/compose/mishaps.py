"""This file is what happens to a compose stack under load: containers are killed, paused, restarted and cut off the network
while generations run through every door, and each of them is compared with an undisturbed one."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx2
import openai

from tests.chaos.chaos import Tally
from tests.chaos.requests import Output, Request
from tests.compose.stack import GATEWAY_PORT, HTTP_PORT, Container, Metrics
from treewire import AsyncClient
from treewire.errors import Overloaded, TreewireError, Unavailable
from treewire.events import Chunk
from treewire.types import Options

KILL, PAUSE, RESTART, CUT = "kill", "pause", "restart", "cut"
KINDS = (KILL, PAUSE, RESTART, CUT)
HEALTH_SECONDS = 2.0
"""Within this time of a replica's death no gateway counts it any more."""
_RETRY_SECONDS = 0.2
_BUSY_SECONDS = 10.0
_POLL_SECONDS = 0.05
_QUIET_SECONDS = 60.0
_DEADLINE_SECONDS = 240.0


class Fault(NamedTuple):
    """Something done to a container."""

    kind: str
    container: Container


class _Count(NamedTuple):
    """What a gateway counted."""

    metrics: Metrics
    series: str
    total: float | None


@dataclass(frozen=True)
class Mishap:
    """A fault as it was: what ran on the container, when a gateway noticed (a death), when it was well again, in seconds."""

    after_seconds: float
    fault: str
    sessions: int
    noticed_seconds: float | None
    well_seconds: float


@dataclass
class Outcome:
    """What became of everything."""

    tally: Tally = field(default_factory=Tally)
    doors: Counter[str] = field(default_factory=Counter)
    mishaps: list[Mishap] = field(default_factory=list)
    failovers: int = 0
    drafter_losses: int = 0
    sessions_left: int = 0
    num_faults_left: int = 0
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """The promises that did not hold."""
        tally = self.tally
        broken = {
            "generations lost": tally.lost,
            "with tokens twice": tally.duplicated,
            "with other tokens": tally.different,
            "sessions left behind": self.sessions_left,
            f"deaths that a gateway noticed after {HEALTH_SECONDS:g} s": sum(
                each.noticed_seconds is not None and each.noticed_seconds > HEALTH_SECONDS for each in self.mishaps
            ),
        }
        return [f"{count} {what}" for what, count in broken.items() if count]


class Doors:
    """The ways to a generation: each gateway over gRPC and over HTTP, and both as one for callers that resume."""

    def __init__(self, gateways: Sequence[Container], model: str) -> None:
        self._model = model
        self.gateways = gateways
        self._addresses = {gateway: gateway.published(GATEWAY_PORT) for gateway in gateways}
        self._urls = {gateway: f"http://{gateway.published(HTTP_PORT)}/v1" for gateway in gateways}

    async def grpc(self, gateway: Container, request: Request, output: _Received) -> None:
        """The SDK at one gateway."""
        async with AsyncClient(self._addresses[gateway]) as client:
            await _read(client, request, output)

    async def resumed(self, gateway: Container, request: Request, output: _Received) -> None:
        """The SDK at all gateways, this one first: it goes on at the next one when it loses one."""
        addresses = sorted(self._addresses, key=lambda each: each is not gateway)
        async with AsyncClient("ipv4:" + ",".join(self._addresses[each] for each in addresses)) as client:
            await _read(client, request, output, resume=True)

    async def http(self, gateway: Container, request: Request, output: _Received) -> None:
        """OpenAI's client at one gateway."""
        prompt: Any = request.text if request.token_ids is None else list(request.token_ids)
        sampling = request.sampling
        extra = {"ignore_eos": request.ignore_end, "return_token_ids": True}
        transport = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=self._urls[gateway], api_key="none", max_retries=0, timeout=_DEADLINE_SECONDS, http_client=transport
        ) as client:
            chunks = await client.completions.create(
                model=self._model,
                prompt=prompt,
                temperature=sampling.temperature,
                seed=sampling.seed,
                max_tokens=request.max_tokens,
                stream=True,
                extra_body=extra,
            )
            async for chunk in chunks:
                choice: Any = chunk.choices[0]
                output.token_ids.extend(choice.token_ids)
                output.pieces.append(choice.text)
                output.is_whole = choice.finish_reason is not None
        if not output.is_whole:
            raise httpx2.RemoteProtocolError("the stream ended without a finish reason")


@dataclass
class _Received:
    """What a generation has given so far."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = False


async def _read(client: AsyncClient, request: Request, output: _Received, *, resume: bool = False) -> None:
    options: Options = {**request.options(), "resume": resume, "deadline_seconds": _DEADLINE_SECONDS}
    async with client.stream(**options) as stream:
        async for event in stream:
            if isinstance(event, Chunk):
                output.token_ids.extend(event.token_ids)
                output.pieces.append(event.text)
        await stream.final()


class Mishaps:
    """Load on a stack, and faults in the midst of it."""

    def __init__(
        self,
        doors: Doors,
        containers: Sequence[Container],
        requests: Sequence[Request],
        outputs: Sequence[Output],
        say: Callable[[str], None],
        *,
        seed: int,
        pause_seconds: float,
    ) -> None:
        self._doors = doors
        self._containers = containers
        self._requests = requests
        self._outputs = outputs
        self._say = say
        self._chance = random.Random(seed)
        self._pause_seconds = pause_seconds
        self._numbers = itertools.count()
        self._started = time.monotonic()
        self._done = asyncio.Event()
        self._num_ended = 0
        self._one_by_one = True
        self._least_faults = 0
        self._seconds = 0.0
        self.outcome = Outcome()

    async def run(
        self,
        faults: Sequence[Fault],
        *,
        least_faults: int,
        seconds: float,
        concurrency: int,
        least_generations: int,
        at_once: int,
    ) -> Outcome:
        """The faults, `at_once` at a time and in this order, with so many streams open all the while.

        After `seconds` those behind the first `least_faults` are left out, and counted.
        """
        self._started = time.monotonic()
        self._one_by_one = at_once == 1
        self._least_faults, self._seconds = least_faults, seconds
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(self._work())
            try:
                turns = iter(faults)
                async with asyncio.TaskGroup() as hurting:
                    for _ in range(at_once):
                        hurting.create_task(self._hurt_all(turns))
                while self._num_ended < least_generations:
                    await asyncio.sleep(_POLL_SECONDS)
            finally:
                self._done.set()
        self.outcome.seconds = round(time.monotonic() - self._started, 1)
        await self._look_at_the_end()
        return self.outcome

    async def _work(self) -> None:
        ways = (("grpc", self._doors.grpc), ("resumed", self._doors.resumed), ("openai", self._doors.http))
        while not self._done.is_set():
            number = next(self._numbers)
            door, way = ways[number % len(ways)]
            index = number % len(self._requests)
            await self._generate(door, way, self._requests[index], self._outputs[index])
            self.outcome.doors[door] += 1
            self._num_ended += 1

    async def _generate(self, door: str, way: Any, request: Request, expected: Output) -> None:
        """One generation; begun again only where nothing of it was delivered."""
        tally = self.outcome.tally
        while True:
            gateway = self._chance.choice(self._doors.gateways)
            num_losses, received = gateway.num_losses, _Received()
            try:
                await way(gateway, request, received)
            except (TreewireError, openai.APIError, httpx2.HTTPError) as error:
                if not received.token_ids and _is_passing(error):
                    tally.tried_again += 1
                    await asyncio.sleep(_RETRY_SECONDS)
                elif gateway.num_losses != num_losses and door != "resumed":
                    tally.gateway_died += 1
                    return
                else:
                    tally.errors.append(
                        f"{door} {gateway.name}: {type(error).__name__} after {len(received.token_ids)} tokens: {error}"
                    )
                    tally.lost += 1
                    return
            else:
                tally.judge(tuple(received.token_ids), "".join(received.pieces), expected)
                return

    async def _hurt_all(self, turns: Iterator[Fault]) -> None:
        for fault in turns:
            is_late = time.monotonic() - self._started > self._seconds
            if is_late and self.outcome.tally.faults.total() >= self._least_faults:
                self.outcome.num_faults_left += 1
            else:
                await self._hurt(fault)

    async def _hurt(self, fault: Fault) -> None:
        """One fault; returns when the container is well again and every gateway sees every replica."""
        kind, container = fault
        lock = container.hurting if container.service != "gateway" else self._doors.gateways[0].hurting  # one door stays open
        async with lock:
            sessions = await self._busy(container)
            started = time.monotonic()
            self.outcome.tally.faults[f"{kind} {container.service}"] += 1
            seconds = self._chance.uniform(0.6, 1.4) * self._pause_seconds
            is_watched = self._one_by_one and kind == KILL and container.service != "gateway"
            noticing = asyncio.create_task(self._noticed(container, await self._counts(container))) if is_watched else None
            act = {KILL: container.kill, PAUSE: container.pause, RESTART: container.restart, CUT: container.cut}[kind]
            await act(seconds)
            noticed_seconds = None if noticing is None else await noticing
            now = time.monotonic()
            mishap = Mishap(
                round(started - self._started, 1),
                f"{kind} {container.name}",
                sessions,
                noticed_seconds,
                round(now - started, 1),
            )
        self.outcome.mishaps.append(mishap)
        noticed = "" if mishap.noticed_seconds is None else f", noticed after {mishap.noticed_seconds:.2f} s"
        tally = self.outcome.tally
        self._say(
            f"{mishap.after_seconds:6.1f} s  {mishap.fault:18} with {sessions} sessions{noticed}, well after "
            f"{mishap.well_seconds:.1f} s; {tally.exact} exact, {tally.gateway_died} whose gateway died, "
            f"{tally.lost + tally.duplicated + tally.different} wrong"
        )

    async def _busy(self, container: Container) -> int:
        """How many sessions a container has, as soon as it has some or that takes too long."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while not (sessions := await container.metric("treewire_sessions")) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return int(sessions)

    async def _counts(self, container: Container) -> list[_Count]:
        """The replicas of the container's service that each gateway counts now."""
        series = f'treewire_replicas{{service="{container.service}"}}'
        known = [metrics for gateway in self._doors.gateways if (metrics := await gateway.metrics()) is not None]
        return [_Count(metrics, series, await metrics.total(series)) for metrics in known]

    @staticmethod
    async def _noticed(container: Container, before: Sequence[_Count]) -> float:
        """Seconds from a container's death until each gateway counts other replicas than before."""
        while await container.is_running():
            await asyncio.sleep(_POLL_SECONDS)
        died = time.monotonic()
        for metrics, series, count in before:
            while await metrics.total(series) == count and time.monotonic() - died < _BUSY_SECONDS:
                await asyncio.sleep(_POLL_SECONDS)
        return round(time.monotonic() - died, 2)

    async def _look_at_the_end(self) -> None:
        """Counts, once nothing runs any more or that takes too long."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while (left := await self._sum(self._containers, "treewire_sessions")) and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
        self.outcome.sessions_left = left
        self.outcome.failovers = await self._sum(self._doors.gateways, "treewire_failovers_total")
        self.outcome.drafter_losses = await self._sum(self._doors.gateways, "treewire_drafter_losses_total")

    @staticmethod
    async def _sum(containers: Sequence[Container], name: str) -> int:
        return int(sum([await container.metric(name) for container in containers]))


def _is_passing(error: Exception) -> bool:
    """True if the gateway was starting, stopping, gone or full."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (429, 503)
    return isinstance(error, Unavailable | Overloaded | openai.APIConnectionError | httpx2.HTTPError)
