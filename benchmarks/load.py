"""This file is a crowd at one gateway: 1,000 streams at once, of which 256 run, with simulated engines on loopback.

python -m benchmarks.load [--streams N] [--running N] [--tokens N] [--json FILE]

Once the rest is queued: all complete, and callers with few requests are not kept waiting by the one with many. Once the
rest is refused: at once, with a time to come back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from tests.chaos.processes import Process
from treewire import AsyncClient
from treewire.errors import TreewireError
from treewire.events import Chunk

CALLERS = ("crowd", "small", "smaller", "smallest")
_SHARES = (0.7, 0.1, 0.1, 0.1)
_MEGABYTE = 2**20
_SAMPLE_SECONDS = 0.1
_LONG_SECONDS = 3600


@dataclass(frozen=True)
class Crowd:
    """How many streams come at once, how many may run, how long each is."""

    streams: int
    running: int
    tokens: int


@dataclass
class Outcome:
    """What became of the streams of one run."""

    completed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: float = 0.0
    most_running: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    end_seconds: dict[str, list[float]] = field(default_factory=lambda: {caller: [] for caller in CALLERS})
    refusal_seconds: list[float] = field(default_factory=list)
    rss_before_megabytes: float = 0.0
    rss_peak_megabytes: float = 0.0

    def summary(self) -> dict[str, object]:
        """The figures for the record."""
        return {
            "completed": self.completed,
            "refused": dict(self.refused),
            "most_running": self.most_running,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.tokens / self.seconds, 1),
            "first_token_seconds_median": _median(self.first_token_seconds),
            "first_token_seconds_p99": _p99(self.first_token_seconds),
            "refusal_seconds_p99": _p99(self.refusal_seconds),
            "end_seconds_median_by_caller": {caller: _median(seconds) for caller, seconds in self.end_seconds.items()},
            "gateway_rss_megabytes": [self.rss_before_megabytes, self.rss_peak_megabytes],
        }


async def measure(crowd: Crowd, max_queued: int) -> Outcome:
    """One run against fresh processes."""
    with tempfile.TemporaryDirectory(prefix="treewire-load-") as folder:
        logs, keys = Path(folder), Path(folder) / "keys.toml"
        keys.write_text("".join(f'[{caller}]\nkey = "{caller}"\n' for caller in CALLERS))
        sessions = ["--max-sessions", str(crowd.running)]
        verify = Process("verify_service", ["--engine", "simulated", *sessions], logs / "verify.log")
        draft = Process("draft_service", ["--engine", "simulated", *sessions], logs / "draft.log")
        addresses = ["--verify", verify.address, "--draft", draft.address, "--model", "simulated", "--keys-file", str(keys)]
        queue = ["--max-running", str(crowd.running), "--max-queued", str(max_queued), "--max-wait-seconds", str(_LONG_SECONDS)]
        gateway = Process("gateway", [*addresses, *queue], logs / "gateway.log")
        processes = (verify, draft, gateway)
        try:
            for process in processes:
                await process.start()
            return await _rush(crowd, gateway)
        finally:
            for process in processes:
                await process.stop()


async def _rush(crowd: Crowd, gateway: Process) -> Outcome:
    """All streams at once; returns when the last has ended."""
    outcome = Outcome(rss_before_megabytes=_rss_megabytes(gateway))
    watching = asyncio.create_task(_watch(gateway, outcome))
    clients = {caller: AsyncClient(gateway.address, token=caller, timeout_seconds=_LONG_SECONDS) for caller in CALLERS}
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as streams:
            for caller, share in zip(CALLERS, _SHARES, strict=True):
                for _ in range(round(crowd.streams * share)):
                    streams.create_task(_stream(clients[caller], caller, crowd.tokens, started, outcome))
    finally:
        watching.cancel()
        for client in clients.values():
            await client.close()
    outcome.seconds = time.perf_counter() - started
    return outcome


async def _stream(client: AsyncClient, caller: str, num_tokens: int, started: float, outcome: Outcome) -> None:
    received = 0
    try:
        async with client.stream("go on", max_tokens=num_tokens, ignore_end=True) as stream:
            async for event in stream:
                if isinstance(event, Chunk):
                    if not received:
                        outcome.first_token_seconds.append(time.perf_counter() - started)
                    received += len(event.token_ids)
    except TreewireError as error:
        outcome.refused[error.reason] += 1
        outcome.refusal_seconds.append(time.perf_counter() - started)
        return
    outcome.completed += received == num_tokens
    outcome.tokens += received
    outcome.end_seconds[caller].append(time.perf_counter() - started)


async def _watch(gateway: Process, outcome: Outcome) -> None:
    while True:
        outcome.rss_peak_megabytes = max(outcome.rss_peak_megabytes, _rss_megabytes(gateway))
        outcome.most_running = max(outcome.most_running, int(await gateway.metric("treewire_sessions")))
        await asyncio.sleep(_SAMPLE_SECONDS)


def _rss_megabytes(process: Process) -> float:
    return float(round(psutil.Process(process.pid).memory_info().rss / _MEGABYTE, 1))


def _median(seconds: Sequence[float]) -> float | None:
    return round(median(seconds), 2) if seconds else None


def _p99(seconds: Sequence[float]) -> float | None:
    return round(quantiles(seconds, n=100)[-1], 2) if len(seconds) > 1 else None


def main(arguments: Sequence[str]) -> int:
    """Both runs; 0 if every stream that was admitted completed, and as many were refused as configured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    crowd = Crowd(options.streams, options.running, options.tokens)
    outcomes = {
        "queued": asyncio.run(measure(crowd, max_queued=crowd.streams)),
        "refused": asyncio.run(measure(crowd, max_queued=0)),
    }
    figures = {name: outcome.summary() for name, outcome in outcomes.items()}
    _show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(provenance() | {"crowd": asdict(crowd)} | figures, indent=2) + "\n")
    queued, refused = outcomes["queued"], outcomes["refused"]
    is_complete = queued.completed == crowd.streams and not queued.refused
    is_bounded = max(queued.most_running, refused.most_running) <= crowd.running
    return 0 if is_complete and is_bounded and refused.completed + refused.refused["OVERLOADED"] == crowd.streams else 1


def _show(figures: dict[str, dict[str, object]]) -> None:
    table = Table("", *figures)
    for name in next(iter(figures.values())):
        table.add_row(name, *(str(figure[name]) for figure in figures.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
