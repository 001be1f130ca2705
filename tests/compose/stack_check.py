"""This file brings the compose stack up from a clean checkout of HEAD with two replicas of each service, generates through
every door of it, hurts its containers one after another and at random under load, and takes the stack down again.

    python -m tests.compose.stack_check

It needs a Docker engine with the compose plugin (v2) on this machine, whose containers it can reach at their addresses; and, in
the Python that runs it, treewire with its developer tools. It exits with 0 if every promise held. Uncommitted changes are not
part of the check.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import openai
from rich.console import Console
from rich.table import Table

from benchmarks.machine import provenance
from tests.chaos.requests import Output, Request, simulated_outputs, simulated_requests, text_requests
from tests.compose.mishaps import KILL, KINDS, Doors, Fault, Mishaps, Outcome
from tests.compose.stack import (
    GATEWAY_PORT,
    HTTP_PORT,
    SERVICES,
    CheckFailedError,
    Container,
    Stack,
    clean_stack,
    require,
    require_engine,
)
from treewire import AsyncClient

LIMIT_SECONDS = float(os.environ.get("COMPOSE_TEST_LIMIT_SECONDS", "2400"))
PASS_SECONDS = float(os.environ.get("COMPOSE_TEST_PASS_SECONDS", "420"))
"""After this time a pass begins no more faults, but for one to each container."""
REPLICAS = 2
SEED = 1
PROMPT = "Write one sentence about the sea."
MODEL = "smollm2-135m"
NUM_RANDOM_FAULTS = 16
NUM_RANDOM_GENERATIONS = 200


class Log:
    """What is said on the way: on the terminal, and kept for the record."""

    def __init__(self) -> None:
        self.console = Console(width=120, record=True, highlight=False)

    def __call__(self, line: str) -> None:
        """One line of progress."""
        self.console.print(line, markup=False)


def check_ports(gateways: Sequence[Container], others: Sequence[Container]) -> None:
    """Gateways are published on loopback, and nothing else is published."""
    for gateway in gateways:
        published = gateway.published(GATEWAY_PORT)
        require(published.startswith("127.0.0.1:"), f"{gateway.name} is published at {published!r}, not on loopback")
    for container in others:
        require(not container.ports(), f"{container.name} publishes {container.ports()}")


def check_generation(stack: Stack, gateway: Container, say: Log) -> None:
    """`treewire generate` on this machine gets text through the gateway, made in rounds; so does OpenAI's client."""
    address = gateway.published(GATEWAY_PORT)
    generated = stack.run(sys.executable, "-m", "treewire", "generate", PROMPT, "--address", address, "--json")
    require(generated.returncode == 0, f"`treewire generate` exited with {generated.returncode}")
    result = json.loads(generated.stdout)
    require(bool(result["text"].strip()), f"no text in {result}")
    require(result["rounds"] > 0, f"no rounds in {result}")
    say(f"treewire generate at {gateway.name}: {result['text']} ({result['rounds']} rounds)")
    url = f"http://{gateway.published(HTTP_PORT)}/v1"
    with openai.OpenAI(base_url=url, api_key="none", http_client=openai.DefaultHttpxClient(trust_env=False)) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": PROMPT}], temperature=0)
    require(
        answer.choices[0].message.content == result["text"], f"the openai client gets {answer.choices[0].message.content!r}"
    )
    say(f"the openai client at {gateway.name} gets the same text")


def check_container(container: Container) -> None:
    """It runs as an ordinary user on a root it cannot write, and a gateway has no model framework."""
    user = container.python("import os; print(os.getuid())").stdout.strip()
    require(user not in ("", "0"), f"{container.name} runs as user {user!r}")
    writable = container.python("import os, sys; print(os.access(sys.prefix, os.W_OK))").stdout.strip()
    require(writable == "False", f"{container.name} can write to its own programs")
    for framework in ("torch", "transformers") if container.service == "gateway" else ():
        absent = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{framework}') is not None)"
        require(container.python(absent).returncode == 0, f"{container.name} has {framework}")


async def undisturbed(gateway: Container, requests: Sequence[Request]) -> list[Output]:
    """What a real model gives to each request, one after another, while nothing happens."""
    async with AsyncClient(gateway.published(GATEWAY_PORT)) as client:
        generations = [await client.generate(**request.options()) for request in requests]
    return [Output(generation.token_ids, generation.text) for generation in generations]


class Check:
    """The check of one stack."""

    def __init__(self, stack: Stack, say: Log) -> None:
        self._stack = stack
        self._say = say
        self.outcomes: dict[str, Outcome] = {}

    def run(self) -> None:
        """All of it; CheckFailedError at the first promise that does not hold."""
        say, stack = self._say, self._stack
        say("== building the images")
        stack.build()
        say(f"== starting {REPLICAS} replicas of each service; the first start fetches the weights")
        stack.up(REPLICAS)
        containers = _containers(stack)
        gateways = [each for each in containers if each.service == "gateway"]
        check_ports(gateways, [each for each in containers if each.service != "gateway"])
        for gateway in gateways:
            check_generation(stack, gateway, say)
        for container in containers:
            check_container(container)
        say("== real model: every container killed in turn, then one of each service paused, restarted, cut off the network")
        one_of_each = [containers[number * REPLICAS] for number in range(len(SERVICES))]
        faults = [Fault(KILL, each) for each in containers]
        faults += [Fault(kind, each) for kind in KINDS if kind != KILL for each in one_of_each]
        requests = text_requests(10, SEED)
        outputs = asyncio.run(undisturbed(gateways[0], requests))
        self._hurt("real model, in turn", stack, MODEL, requests, outputs, faults, concurrency=4)
        say("== simulated engines: everything done to every container in turn, then at random, two at once")
        simulated = stack.with_file("tests/compose/simulated.yaml")
        simulated.up(REPLICAS)
        containers, chance = _containers(simulated), random.Random(SEED)
        requests = simulated_requests(64, SEED)
        outputs = simulated_outputs(requests)
        turns = range(len(KINDS))
        faults = [Fault(KINDS[(turn + at) % len(KINDS)], each) for turn in turns for at, each in enumerate(containers)]
        self._hurt("simulated, in turn", simulated, "simulated", requests, outputs, faults, concurrency=12)
        faults = [Fault(chance.choice(KINDS), chance.choice(containers)) for _ in range(NUM_RANDOM_FAULTS)]
        self._hurt("simulated, at random", simulated, "simulated", requests, outputs, faults, concurrency=12, at_once=2)

    def _hurt(
        self,
        title: str,
        stack: Stack,
        model: str,
        requests: Sequence[Request],
        outputs: Sequence[Output],
        faults: Sequence[Fault],
        *,
        concurrency: int,
        at_once: int = 1,
    ) -> None:
        containers = list(dict.fromkeys(fault.container for fault in faults))
        doors = Doors([each for each in containers if each.service == "gateway"], model)
        mishaps = Mishaps(doors, containers, requests, outputs, self._say, seed=SEED, pause_seconds=3.0)
        least = 0 if at_once == 1 else NUM_RANDOM_GENERATIONS
        self.outcomes[title] = outcome = mishaps.outcome
        try:
            asyncio.run(
                mishaps.run(
                    faults,
                    least_faults=len(containers),
                    seconds=PASS_SECONDS,
                    concurrency=concurrency,
                    least_generations=least,
                    at_once=at_once,
                )
            )
        except* CheckFailedError as failures:
            first = next(leaf for leaf in _leaves(failures))
            raise first from failures
        for error in outcome.tally.errors:
            self._say(error)
        require(not outcome.failures, f"{title}: {', '.join(outcome.failures)}")


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        yield from _leaves(each) if isinstance(each, BaseExceptionGroup) else (each,)


def _containers(stack: Stack) -> list[Container]:
    return [container for service in SERVICES for container in stack.containers(service, REPLICAS)]


def show(outcomes: dict[str, Outcome], console: Console) -> None:
    """The summary."""
    table = Table("", *outcomes)
    rows: dict[str, Sequence[object]] = {
        "exact": [outcome.tally.exact for outcome in outcomes.values()],
        "by door": [", ".join(f"{count} {door}" for door, count in sorted(each.doors.items())) for each in outcomes.values()],
        "lost / duplicated / different": [
            f"{each.tally.lost} / {each.tally.duplicated} / {each.tally.different}" for each in outcomes.values()
        ],
        "gateway died in mid-stream (not counted)": [each.tally.gateway_died for each in outcomes.values()],
        "begun again before the first token": [each.tally.tried_again for each in outcomes.values()],
        "faults": [", ".join(f"{n} x {kind}" for kind, n in sorted(each.tally.faults.items())) for each in outcomes.values()],
        "faults left out for want of time": [each.num_faults_left for each in outcomes.values()],
        "deaths noticed after (s)": [
            ", ".join(f"{each.noticed_seconds:.2f}" for each in outcome.mishaps if each.noticed_seconds is not None)
            for outcome in outcomes.values()
        ],
        "failovers, drafter losses": [f"{each.failovers}, {each.drafter_losses}" for each in outcomes.values()],
        "sessions left behind": [each.sessions_left for each in outcomes.values()],
        "seconds": [each.seconds for each in outcomes.values()],
        "verdict": ["BROKEN" if each.failures else "holds" for each in outcomes.values()],
    }
    for name, cells in rows.items():
        table.add_row(name, *map(str, cells))
    console.print(table)


def to_json(outcomes: dict[str, Outcome], seconds: float, failure: str | None) -> str:
    """The outcome for the record."""
    figures = {
        title: {
            **asdict(outcome),
            "tally": vars(outcome.tally) | {"faults": dict(outcome.tally.faults)},
            "doors": dict(outcome.doors),
        }
        for title, outcome in outcomes.items()
    }
    verdict = {"seed": SEED, "replicas": REPLICAS, "seconds": round(seconds, 1), "holds": failure is None, "failure": failure}
    return json.dumps(provenance() | verdict | {"outcomes": figures}, indent=2)


def main(arguments: Sequence[str]) -> int:
    """Check everything; 1 with the reason on the first promise that does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose.stack_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the outcome")
    parser.add_argument("--log", type=Path, help="file for what was said on the way")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    say, started, outcomes, failure = Log(), time.monotonic(), {}, None
    try:
        require_engine()
        with clean_stack(LIMIT_SECONDS, REPLICAS) as stack:
            check = Check(stack, say)
            outcomes = check.outcomes
            check.run()
    except CheckFailedError as error:
        failure = str(error)
    seconds = time.monotonic() - started
    if outcomes:
        show(outcomes, say.console)
    say(f"== FAILED: {failure}" if failure else f"== all promises held, {seconds:.0f} s")
    if options.json is not None:
        options.json.write_text(to_json(outcomes, seconds, failure) + "\n")
    if options.log is not None:
        options.log.write_text(say.console.export_text())
    return 0 if failure is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
