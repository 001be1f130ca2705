"""This file is what a round costs beside the models: host time by stage, and rounds a second of many streams with a profile.

python -m benchmarks.micro.overhead [--budget 64] [--rounds N] [--streams 64] [--json FILE]

Engines are simulated, in processes of their own. One stream is timed from outside: a round's wall time less the steps of both
engines; the CPU time of the gateway's process says what is left of that on a machine that does other things too. For the many
streams the gateway and its clients run in this process under cProfile, which says on what its thread spends CPU time; rounds a
second are measured without the profiler as well.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import gateway.assembly
from benchmarks.machine import provenance
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenization
from tests.chaos.processes import Process
from treewire.client import AsyncClient
from treewire.runtime.logging import configure_logging
from treewire.runtime.server import Server
from treewire.types import Statistics

BOUND_MS = 3.0
_ENGINES = ("verify.step", "draft.step")
_TOKENS_A_ROUND = 3  # about what simulated drafts give
_PARTS = {
    "gateway/": "gateway",
    "treewire/core/": "core: tree and budget",
    "treewire/wire": "wire: messages and core types",
    "treewire/client": "clients",
    "treewire/": "runtime and SDK",
    "/grpc/": "gRPC",
    "google/": "protobuf",
    "/asyncio/": "asyncio",
    "uvloop": "asyncio",
    "prometheus_client": "metrics",
    "structlog": "logs",
    "numpy": "numpy",
}


async def single(budget: int, num_rounds: int) -> dict[str, object]:
    """One stream over three processes: milliseconds of a round by stage."""
    async with AsyncExitStack() as stack:
        verify, draft = await _engines(stack)
        flags = ["--verify", verify.address, "--draft", draft.address, "--model", "simulated"]
        door = await _started(stack, Process("gateway", flags, Path(tempfile.mkdtemp()) / "gateway.log"))
        client = await stack.enter_async_context(AsyncClient(door.address))
        tokens = num_rounds * _TOKENS_A_ROUND
        await client.generate("go on", max_tokens=100, ignore_end=True, budget=budget)  # what is loaded lazily
        cpu_before = _cpu_seconds(door)
        answer = await client.generate("go on", max_tokens=tokens, ignore_end=True, budget=budget)
        cpu_ms = 1e3 * (_cpu_seconds(door) - cpu_before) / answer.statistics.rounds
    return {**_by_stage(answer.statistics), "gateway_cpu_ms": round(cpu_ms, 3)}


def _cpu_seconds(process: Process) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _by_stage(statistics: Statistics) -> dict[str, object]:
    rounds = statistics.rounds
    stages = {name: 1e3 * seconds / rounds for name, seconds in statistics.stage_seconds.items() if name != "prefill"}
    round_ms = 1e3 * (statistics.total_seconds - statistics.ttft_seconds) / rounds
    engines_ms = sum(stages[name] for name in _ENGINES)
    inner = sum(value for name, value in stages.items() if "." not in name)
    return {
        "rounds": rounds,
        "mean_nodes": round(statistics.draft_tokens / rounds, 1),
        "round_ms": round(round_ms, 3),
        "engines_ms": round(engines_ms, 3),
        "host_ms": round(round_ms - engines_ms, 3),
        "bound_ms": BOUND_MS,
        "stage_ms": {name: round(value, 3) for name, value in sorted(stages.items())} | {"emit": round(round_ms - inner, 3)},
    }


async def many(budget: int, num_rounds: int, num_streams: int, profile: cProfile.Profile | None) -> float:
    """Rounds a second of all streams together, the gateway and the clients in this process."""
    async with AsyncExitStack() as stack:
        verify, draft = await _engines(stack)
        settings = GatewaySettings(bind="127.0.0.1:0", verify=(verify.address,), draft=(draft.address,), model="simulated")
        process = await stack.enter_async_context(gateway.assembly.assemble(settings, Tokenization.simulated))
        services = [gateway.assembly.SERVICE]
        server = Server(settings, register=process.register, services=services, metrics=process.metrics)
        await stack.enter_async_context(server)
        await process.warm_up()
        client = await stack.enter_async_context(AsyncClient(str(server.endpoint)))
        await client.generate("go on", max_tokens=50, ignore_end=True, budget=budget)
        if profile is not None:
            profile.enable()
        started = time.perf_counter()
        tokens = max(2, num_rounds * _TOKENS_A_ROUND // num_streams)
        answers = await asyncio.gather(
            *(client.generate(f"say {n}", max_tokens=tokens, ignore_end=True, budget=budget) for n in range(num_streams))
        )
        seconds = time.perf_counter() - started
        if profile is not None:
            profile.disable()
    return sum(answer.statistics.rounds for answer in answers) / seconds


async def _engines(stack: AsyncExitStack) -> tuple[Process, Process]:
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treewire-overhead-")))
    flags = ["--engine", "simulated"]
    verify = await _started(stack, Process("verify_service", flags, logs / "verify.log"))
    return verify, await _started(stack, Process("draft_service", flags, logs / "draft.log"))


async def _started(stack: AsyncExitStack, process: Process) -> Process:
    await process.start()
    stack.push_async_callback(process.stop)
    return process


def shares(profile: cProfile.Profile, num_largest: int = 12) -> dict[str, object]:
    """Where the profiled thread's time went: shares by part, and the functions that took most themselves."""
    by_part: defaultdict[str, float] = defaultdict(float)
    by_function: list[tuple[float, str]] = []
    stats = pstats.Stats(profile)
    for (file, line, name), (_, _, own_seconds, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        waits = "poll" in name or "select" in name
        by_part["waiting for the services" if waits else _part(file, name)] += own_seconds
        by_function.append((own_seconds, f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"))
    total = sum(by_part.values())
    largest = sorted(by_function, reverse=True)[:num_largest]
    return {
        "share_by_part": {part: round(own / total, 3) for part, own in sorted(by_part.items(), key=lambda item: -item[1])},
        "share_by_function": {name: round(own / total, 3) for own, name in largest},
    }


def _part(file: str, name: str) -> str:
    return next((part for beginning, part in _PARTS.items() if beginning in file or beginning in name), "Python and the rest")


def main(arguments: Sequence[str]) -> int:
    """Measure and show; 1 if a round's host time is above its bound."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.overhead", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    configure_logging("warning", "console")
    alone = asyncio.run(single(options.budget, options.rounds))
    rounds_per_second = asyncio.run(many(options.budget, options.rounds, options.streams, None))
    profile = cProfile.Profile(time.thread_time)
    profiled = asyncio.run(many(options.budget, options.rounds, options.streams, profile))
    crowd: dict[str, object] = {
        "streams": options.streams,
        "rounds_per_second": round(rounds_per_second, 1),
        "rounds_per_second_profiled": round(profiled, 1),
        **shares(profile),
    }
    console = Console()
    stages = alone.pop("stage_ms")
    assert isinstance(stages, dict)
    for title, figures in (("one stream", alone), ("ms of a round", stages), ("many streams", crowd)):
        table = Table("", "", title=title, show_header=False)
        for name, value in figures.items():
            shown = "\n".join(f"{key}  {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
            table.add_row(name, shown)
        console.print(table)
    if options.json is not None:
        figures = {"budget": options.budget, "one_stream": alone | {"stage_ms": stages}, "many_streams": crowd}
        options.json.write_text(json.dumps(provenance() | figures, indent=2) + "\n")
    return int(float(str(alone["host_ms"])) > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
