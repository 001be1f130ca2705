"""Chaos: processes of a stack on loopback are killed, stopped and restarted at random while many generations run.

    python -m tests.chaos.chaos --generations 2000 --seed 1

Every generation whose gateway lived must end with exactly the tokens and the text of an undisturbed run; afterwards no
session, task or file descriptor may be left. Exits with 0 if that held.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from tests.chaos.processes import Process
from tests.chaos.requests import Output, Request, simulated_outputs, simulated_requests, text_requests
from treewire import AsyncClient
from treewire.errors import Overloaded, TreewireError, Unavailable
from treewire.events import Chunk

SIMULATED = "simulated"
RANDOM = "random"
"""Processes are killed, stopped and restarted by chance."""
ROLLING = "rolling"
"""Every process is restarted once, in an orderly way, one after another."""
_MEGABYTE = 2**20
_QUIET_SECONDS = 60.0
_SAMPLE_SECONDS = 0.5
_MAX_GROWTH = 1.10
_FREE_GROWTH_BYTES = 16 * _MEGABYTE
_RETRY_SECONDS = 0.1
_NUM_LOOKS = 5


@dataclass(frozen=True)
class Plan:
    """What is run and how badly it is treated.

    `soak_seconds` is the least duration: requests go on until it is over; with rolling faults until every process was
    restarted. `mean_pause_seconds` is between two faults, `step_seconds` the least duration of a simulated target's step.
    `spared` names services, with commas between, whose first process is only ever paused.
    """

    generations: int = 2000
    concurrency: int = 48
    distinct: int = 128
    verify: int = 3
    draft: int = 2
    gateways: int = 2
    seed: int = 1
    target: str = SIMULATED
    mean_pause_seconds: float = 1.0
    limit_seconds: float = 1800.0
    soak_seconds: float = 0.0
    max_faults_at_once: int = 2
    faults: str = RANDOM
    step_seconds: float = 0.002
    spared: str = "gateway"

    def __post_init__(self) -> None:
        if self.faults not in (RANDOM, ROLLING):
            raise ValueError(f"faults is {self.faults}, known are {RANDOM} and {ROLLING}")

    def verify_flags(self) -> list[str]:
        """Flags of a verify service."""
        if self.target == SIMULATED:
            return ["--engine", SIMULATED, "--simulated-step-seconds", str(self.step_seconds), "--grace-seconds", "5"]
        return ["--engine", "transformers", "--model", self.target, "--threads", "1", "--grace-seconds", "5"]

    def draft_flags(self) -> list[str]:
        """Flags of a draft service."""
        return ["--engine", SIMULATED if self.target == SIMULATED else "ngram", "--grace-seconds", "1"]

    def gateway_flags(self, verify: Sequence[Process], draft: Sequence[Process]) -> list[str]:
        """Flags of a gateway: short waits for one answer, long patience with all of them."""
        round_seconds = "5" if self.target == SIMULATED else "20"
        waits = ["--verify-timeout-seconds", round_seconds, "--prefill-timeout-seconds", round_seconds]
        patience = ["--failover-attempts", "50", "--failover-seconds", "180", "--grace-seconds", "120"]
        addresses = ["--verify", _addresses(verify), "--draft", _addresses(draft)]
        return [*addresses, "--model", self.target, "--draft-timeout-seconds", "1", *waits, *patience]


@dataclass
class Tally:
    """What became of the generations, and what was done to the processes."""

    exact: int = 0
    lost: int = 0
    duplicated: int = 0
    different: int = 0
    gateway_died: int = 0
    tried_again: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def judge(self, token_ids: tuple[int, ...], text: str, expected: Output) -> None:
        """Count a generation that ended."""
        if token_ids == expected.token_ids and text == expected.text:
            self.exact += 1
        elif len(token_ids) > len(expected.token_ids):
            self.duplicated += 1
        elif token_ids == expected.token_ids[: len(token_ids)]:
            self.lost += 1
        else:
            self.different += 1


@dataclass(frozen=True)
class Remains:
    """What is left when all is quiet; tasks and file descriptors are those of the gateway that lived all along.

    Where that was restarted too, they show nothing. `opened` says what the file descriptors are that it did not have before.
    `rss_megabytes` has the resident memory of each process that was spared, in the second and in the last quarter of the run.
    """

    sessions: int
    tasks: int
    file_descriptors: int
    opened: list[str]
    rss_megabytes: dict[str, tuple[float, float]]

    @property
    def rss_is_flat(self) -> bool:
        """True if no resident memory grew beyond the noise."""
        free = _FREE_GROWTH_BYTES / _MEGABYTE
        return all(end <= start * _MAX_GROWTH + free for start, end in self.rss_megabytes.values())


@dataclass(frozen=True)
class Report:
    """The outcome of a run."""

    plan: Plan
    tally: Tally
    failovers: float
    drafter_losses: float
    remains: Remains
    seconds: float

    @property
    def holds(self) -> bool:
        """True if nothing was lost, changed or left behind."""
        tally, remains = self.tally, self.remains
        broken = (tally.lost, tally.duplicated, tally.different, remains.sessions, remains.tasks, remains.file_descriptors)
        return not any(broken) and remains.rss_is_flat and tally.exact + tally.gateway_died >= self.plan.generations


class Stack:
    """All processes of a run. Those that are spared are only ever paused: they show what a long life leaves behind."""

    def __init__(self, plan: Plan, logs: Path) -> None:
        self.verify = [Process("verify_service", plan.verify_flags(), logs / f"verify{n}.log") for n in range(plan.verify)]
        self.draft = [Process("draft_service", plan.draft_flags(), logs / f"draft{n}.log") for n in range(plan.draft)]
        flags = plan.gateway_flags(self.verify, self.draft)
        self.gateways = [Process("gateway", flags, logs / f"gateway{n}.log") for n in range(plan.gateways)]
        services = {"verify": self.verify, "draft": self.draft, "gateway": self.gateways}
        self.spared = {name: services[name][0] for name in plan.spared.split(",")}

    @property
    def witness(self) -> Process:
        """The gateway that is looked into."""
        return self.gateways[0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Stack]:
        """Started in order; gone at the end."""
        try:
            await asyncio.gather(*(process.start() for process in [*self.verify, *self.draft]))
            await asyncio.gather(*(process.start() for process in self.gateways))
            yield self
        finally:
            for process in [*self.gateways, *self.draft, *self.verify]:
                await process.stop()


class Chaos:
    """The load and the faults of one run."""

    def __init__(self, plan: Plan, stack: Stack, requests: Sequence[Request], outputs: Sequence[Output]) -> None:
        self._plan = plan
        self._stack = stack
        self._requests = requests
        self._outputs = outputs
        self._chance = random.Random(plan.seed)
        self._turns = itertools.cycle(stack.gateways)
        self._numbers = itertools.count()
        self._started = time.monotonic()
        self._done = asyncio.Event()
        self._rolled = asyncio.Event()
        if plan.faults == RANDOM:
            self._rolled.set()
        self._rss: dict[str, list[int]] = {name: [] for name in stack.spared}
        self.tally = Tally()

    async def run(self) -> None:
        """Load and faults until every generation has ended, then until every process is back."""
        self._started = time.monotonic()
        watching = asyncio.create_task(self._sample_rss())
        hurting = asyncio.create_task(self._hurt_all() if self._plan.faults == RANDOM else self._roll())
        try:
            async with asyncio.timeout(self._plan.limit_seconds), asyncio.TaskGroup() as workers:
                for _ in range(self._plan.concurrency):
                    workers.create_task(self._work())
        finally:
            self._done.set()
            watching.cancel()
            await hurting

    async def _work(self) -> None:
        clients = {gateway: AsyncClient(gateway.address) for gateway in self._stack.gateways}
        try:
            while (number := next(self._numbers)) < self._plan.generations or not self._is_soaked:
                index = number % len(self._requests)
                await self._generate(clients, self._requests[index], self._outputs[index])
        finally:
            for client in clients.values():
                await client.close()

    @property
    def _is_soaked(self) -> bool:
        return self._rolled.is_set() and time.monotonic() - self._started >= self._plan.soak_seconds

    async def _generate(self, clients: dict[Process, AsyncClient], request: Request, expected: Output) -> None:
        """One generation; begun again only where nothing of it was delivered."""
        while True:
            gateway = next(self._turns)
            num_deaths = gateway.num_deaths
            token_ids: list[int] = []
            pieces: list[str] = []
            try:
                async with clients[gateway].stream(**request.options()) as stream:
                    async for event in stream:
                        if isinstance(event, Chunk):
                            token_ids.extend(event.token_ids)
                            pieces.append(event.text)
                    await stream.final()
            except TreewireError as error:
                if gateway.num_deaths == num_deaths and not (isinstance(error, Unavailable | Overloaded) and not token_ids):
                    self.tally.errors.append(f"{type(error).__name__} after {len(token_ids)} tokens: {error.message}")
                    self.tally.lost += 1
                    return
                if token_ids:
                    self.tally.gateway_died += 1
                    return
                self.tally.tried_again += 1
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self.tally.judge(tuple(token_ids), "".join(pieces), expected)
                return

    async def _roll(self) -> None:
        stack = self._stack
        for process in [*stack.verify, *stack.draft, *stack.gateways]:
            self.tally.faults[f"drain {process.module.removesuffix('_service')}"] += 1
            await process.drain()
        self._rolled.set()

    async def _hurt_all(self) -> None:
        hurts: set[asyncio.Task[None]] = set()
        while not self._done.is_set():
            await asyncio.sleep(self._chance.uniform(0.2, 1.8) * self._plan.mean_pause_seconds)
            hurts = {hurt for hurt in hurts if not hurt.done()}
            if len(hurts) < self._plan.max_faults_at_once:
                hurts.add(asyncio.create_task(self._hurt()))
        await asyncio.gather(*hurts)

    async def _hurt(self) -> None:
        """One fault at one process; returns when the process is well again."""
        stack = self._stack
        process = self._chance.choice([*stack.verify * 2, *stack.draft * 2, *stack.gateways])
        kind = "pause" if process in stack.spared.values() else self._chance.choice(["kill", "pause", "drain"])
        if process.hurting.locked():
            return
        async with process.hurting:
            self.tally.faults[f"{kind} {process.module.removesuffix('_service')}"] += 1
            match kind:
                case "kill":
                    await process.kill()
                case "pause":
                    await process.pause(self._chance.uniform(0.3, 4.0))
                case _:
                    await process.drain()

    async def _sample_rss(self) -> None:
        while True:
            for name, process in self._stack.spared.items():
                with suppress(psutil.NoSuchProcess):
                    self._rss[name].append(psutil.Process(process.pid).memory_info().rss)
            await asyncio.sleep(_SAMPLE_SECONDS)

    def rss_megabytes(self) -> dict[str, tuple[float, float]]:
        """Median resident memory of the spared processes in the second and in the last quarter of the run."""
        medians = {}
        for name, samples in self._rss.items():
            quarter = max(1, len(samples) // 4)
            medians[name] = (_megabytes(samples[quarter : 2 * quarter] or samples), _megabytes(samples[-quarter:]))
        return medians


def _megabytes(samples: Sequence[int]) -> float:
    return round(statistics.median(samples) / _MEGABYTE, 1)


async def run(plan: Plan, say: Console) -> Report:
    """One whole run."""
    with tempfile.TemporaryDirectory(prefix="treewire-chaos-") as folder:
        async with Stack(plan, Path(folder)).running() as stack:
            requests, outputs = await _undisturbed(plan, stack)
            say.print(f"{len(requests)} distinct requests, {sum(len(output.token_ids) for output in outputs):,} tokens")
            await _warm_up(stack, requests, plan.concurrency)
            await _settle(stack, plan)
            witness, before = stack.witness.pid, await _handles(stack.witness)
            started = time.monotonic()
            chaos = Chaos(plan, stack, requests, outputs)
            await chaos.run()
            seconds = time.monotonic() - started
            await _settle(stack, plan)
            after = await _handles(stack.witness) if stack.witness.pid == witness else before
            return Report(
                plan=plan,
                tally=chaos.tally,
                failovers=await stack.witness.metric("treewire_failovers_total"),
                drafter_losses=await stack.witness.metric("treewire_drafter_losses_total"),
                remains=Remains(
                    sessions=await _num_sessions(stack),
                    tasks=max(0, after.tasks - before.tasks),
                    file_descriptors=max(0, len(after.file_descriptors) - len(before.file_descriptors)),
                    opened=sorted((after.file_descriptors - before.file_descriptors).elements()),
                    rss_megabytes=chaos.rss_megabytes(),
                ),
                seconds=round(seconds, 1),
            )


async def _warm_up(stack: Stack, requests: Sequence[Request], count: int) -> None:
    """As many generations on each gateway as will run at once: what a first use takes for good is no leak."""
    for gateway in stack.gateways:
        async with AsyncClient(gateway.address) as client:
            chosen = itertools.islice(itertools.cycle(requests), count)
            await asyncio.gather(*(client.generate(**request.options()) for request in chosen))


async def _undisturbed(plan: Plan, stack: Stack) -> tuple[list[Request], list[Output]]:
    """The requests and what each must give; a real model is asked for it, one request at a time, before the first fault."""
    if plan.target == SIMULATED:
        requests = simulated_requests(plan.distinct, plan.seed)
        return requests, await asyncio.to_thread(simulated_outputs, requests)
    requests = text_requests(plan.distinct, plan.seed)
    async with AsyncClient(stack.witness.address) as client:
        generations = [await client.generate(**request.options()) for request in requests]
    return requests, [Output(generation.token_ids, generation.text) for generation in generations]


@dataclass(frozen=True)
class _Handles:
    """What a process holds."""

    tasks: int
    file_descriptors: Counter[str]


async def _handles(process: Process) -> _Handles:
    """The least of several looks: the answers to these looks hold handles of their own for a moment."""
    tasks, file_descriptors = [], []
    for _ in range(_NUM_LOOKS):
        tasks.append(int(await process.metric("treewire_tasks")))
        await asyncio.sleep(_SAMPLE_SECONDS)
        file_descriptors.append(_file_descriptors(process.pid))
    return _Handles(min(tasks), min(file_descriptors, key=Counter.total))


def _file_descriptors(pid: int) -> Counter[str]:
    """What the open file descriptors of a process are: paths, and of connections both ends."""
    process = psutil.Process(pid)
    connections = {
        each.fd: f"tcp {_end(each.laddr)} -> {_end(each.raddr)} {each.status}" for each in process.net_connections("tcp")
    }
    targets: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            targets[connections.get(int(link.name)) or str(link.readlink())] += 1
    return targets


def _end(address: object) -> str:
    return ":".join(str(part) for part in address) if isinstance(address, tuple) else ""


async def _settle(stack: Stack, plan: Plan) -> None:
    """Return when the witness sees every replica and nothing runs; or when that takes too long, for the report to tell."""
    deadline = time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < deadline:
        num_replicas = await stack.witness.metric("treewire_replicas")
        if num_replicas == plan.verify + plan.draft and await _num_sessions(stack) == 0:
            await asyncio.sleep(2.0)  # connections that were given up are closed
            return
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _num_sessions(stack: Stack) -> int:
    """Sessions in the draft and verify services, generations in the gateways."""
    services = [await process.num_sessions() for process in [*stack.verify, *stack.draft]]
    gateways = [await process.metric("treewire_sessions") for process in stack.gateways]
    return sum(services) + int(sum(gateways))


def show(report: Report, console: Console) -> None:
    """The outcome as a table."""
    tally, remains = report.tally, report.remains
    table = Table(title=f"chaos, seed {report.plan.seed}, {report.seconds:.0f} s", show_header=False)
    faults = ", ".join(f"{count} x {kind}" for kind, count in sorted(tally.faults.items()))
    rows = {
        "exact": tally.exact,
        "lost / duplicated / different": f"{tally.lost} / {tally.duplicated} / {tally.different}",
        "gateway died in mid-stream (not counted)": tally.gateway_died,
        "begun again before the first token": tally.tried_again,
        "faults": faults,
        "failovers, drafter losses (first gateway)": f"{report.failovers:.0f}, {report.drafter_losses:.0f}",
        "leaked sessions / tasks / file descriptors": f"{remains.sessions} / {remains.tasks} / {remains.file_descriptors}",
        "resident memory": ", ".join(f"{name} {start} -> {end} MB" for name, (start, end) in remains.rss_megabytes.items()),
        "verdict": "holds" if report.holds else "BROKEN",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    if remains.file_descriptors:
        console.print("\n".join(["open now, and not before:", *remains.opened]), style="red")
    for error in tally.errors[:20]:
        console.print(error, style="red")


def to_json(report: Report) -> str:
    """The outcome for the record: with command, machine and commit."""
    outcome = {
        "plan": asdict(report.plan),
        "seconds": report.seconds,
        "generations": vars(report.tally) | {"faults": dict(report.tally.faults)},
        "failovers": report.failovers,
        "drafter_losses": report.drafter_losses,
        "remains": asdict(report.remains),
        "holds": report.holds,
    }
    return json.dumps(provenance() | outcome, indent=2)


def _addresses(processes: Sequence[Process]) -> str:
    return ",".join(process.address for process in processes)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.chaos", description=__doc__.splitlines()[0])
    default = Plan()
    for name, value in asdict(default).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="file for the outcome")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the plan of the command line; 0 if it held."""
    options = vars(_parse(arguments))
    output: Path | None = options.pop("json")
    console = Console()
    report = asyncio.run(run(Plan(**options), console))
    show(report, console)
    if output is not None:
        output.write_text(to_json(report) + "\n")
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
