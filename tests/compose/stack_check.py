"""This file brings the compose stack up from a clean checkout of HEAD, streams one generation through it from this
machine, checks what the images promise, and takes the stack down again.

    python tests/compose/stack_check.py

It needs a Docker engine with the compose plugin (v2) and, in the Python that runs it, treewire with the `cli` extra. It
exits with 0 if every promise held. Uncommitted changes are not part of the check.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = float(os.environ.get("COMPOSE_TEST_LIMIT_SECONDS", "1500"))
CLEANUP_SECONDS = 180.0
SERVICES = ("draft", "verify", "gateway")
GATEWAY_PORT = 50050
PROMPT = "Write one sentence about the sea."

NEEDS_ENGINE = """this check needs a running Docker engine with the compose plugin (v2), and `{command}` failed:
{reason}
Install Docker Engine from your distribution or from docs.docker.com/engine/install, start it, and see that
`docker info` and `docker compose version` work as this user."""


class CheckFailedError(Exception):
    """A promise of the stack did not hold; the message says which."""


@dataclass(frozen=True)
class Stack:
    """One compose project: where its files lie, under what name it runs, and when it must be done."""

    checkout: Path
    project: str
    environment: Mapping[str, str]
    deadline: float

    def run(self, *command: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout within what is left of the time; CheckFailedError when the time is up."""
        remaining_seconds = self.deadline - time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.checkout, env=self.environment, stdout=stdout, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=max(remaining_seconds, 0.0))
        except subprocess.TimeoutExpired as expired:
            raise CheckFailedError(f"the check took more than {LIMIT_SECONDS:.0f} s, in `{' '.join(command)}`") from expired
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return subprocess.CompletedProcess(command, process.returncode, output)

    def compose(self, *arguments: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        """Run `docker compose` on this project."""
        return self.run("docker", "compose", "--project-name", self.project, *arguments, stdout=stdout)

    def inside(self, service: str, code: str) -> subprocess.CompletedProcess[str]:
        """Run Python code in a service's container."""
        return self.compose("exec", "-T", service, "python", "-c", code)


def require(holds: bool, otherwise: str) -> None:
    """CheckFailedError with the message `otherwise` unless it holds."""
    if not holds:
        raise CheckFailedError(otherwise)


def say(step: str) -> None:
    """One line of progress."""
    print(f"== {step}", flush=True)


def require_engine() -> None:
    """CheckFailedError, with the way out, unless a Docker engine and its compose plugin answer."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            raise CheckFailedError(NEEDS_ENGINE.format(command=" ".join(command), reason=error)) from error
        require(answer.returncode == 0, NEEDS_ENGINE.format(command=" ".join(command), reason=answer.stderr.strip()))


def check_out_head(destination: Path) -> None:
    """Put the files of HEAD, and nothing else, into `destination`."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(destination, filter="data")


@contextmanager
def clean_stack() -> Iterator[Stack]:
    """A stack of HEAD under a name, image tag and port of its own; all of it is removed at the end."""
    project = f"treewire-check-{secrets.token_hex(4)}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TREEWIRE_", "COMPOSE_"))}
    environment = inherited | {"TREEWIRE_TAG": project, "TREEWIRE_PORT": "0", "TREEWIRE_HTTP_PORT": "0"}
    with tempfile.TemporaryDirectory(prefix=project) as folder:
        checkout = Path(folder)
        check_out_head(checkout)
        stack = Stack(checkout, project, environment, time.monotonic() + LIMIT_SECONDS)
        try:
            yield stack
        except CheckFailedError:
            say("what the services logged")
            unhurried(stack).compose("logs", "--no-color", "--tail", "200", stdout=None)
            raise
        finally:
            say("taking the stack down")
            unhurried(stack).compose("down", "--volumes", "--remove-orphans", "--rmi", "all", stdout=None)


def unhurried(stack: Stack) -> Stack:
    """The same stack with time to clean up, however late it is."""
    return Stack(stack.checkout, stack.project, stack.environment, time.monotonic() + CLEANUP_SECONDS)


def bring_up(stack: Stack) -> None:
    """Build the images and start the services; returns when every service is healthy."""
    say("building the images")
    require(stack.compose("--progress", "plain", "build", stdout=None).returncode == 0, "the images do not build")
    say("starting the services; the first start fetches the weights")
    up = stack.compose("--progress", "plain", "up", "--detach", "--no-build", "--wait", *SERVICES, stdout=None)
    require(up.returncode == 0, "the services do not become healthy")


def gateway_address(stack: Stack) -> str:
    """Where the gateway answers on this machine: loopback, and the only port that the stack publishes."""
    published = stack.compose("port", "gateway", str(GATEWAY_PORT)).stdout.strip()
    require(published.startswith("127.0.0.1:"), f"the gateway is published at {published!r}, not on loopback")
    for service in ("draft", "verify"):
        ports = stack.run("docker", "port", stack.compose("ps", "--quiet", service).stdout.strip()).stdout.strip()
        require(not ports, f"{service} publishes {ports}")
    return published


def check_generation(stack: Stack, address: str) -> None:
    """`treewire generate` on this machine gets text through the stack, made in rounds."""
    say(f"generating through {address}")
    command = [sys.executable, "-m", "treewire", "generate", PROMPT, "--address", address, "--json"]
    generated = stack.run(*command)
    require(generated.returncode == 0, f"`treewire generate` exited with {generated.returncode}")
    result = json.loads(generated.stdout)
    require(bool(result["text"].strip()), f"no text in {result}")
    require(result["rounds"] > 0, f"no rounds in {result}")
    print(f"{result['text']}\n({result['rounds']} rounds)", flush=True)


def check_containers(stack: Stack, services: Sequence[str]) -> None:
    """Every service runs as an ordinary user on a root it cannot write, and the gateway has no model framework."""
    say("looking into the containers")
    for service in services:
        user = stack.inside(service, "import os; print(os.getuid())").stdout.strip()
        require(user not in ("", "0"), f"{service} runs as user {user!r}")
        writable = stack.inside(service, "import os, sys; print(os.access(sys.prefix, os.W_OK))").stdout.strip()
        require(writable == "False", f"{service} can write to its own programs")
    for framework in ("torch", "transformers"):
        absent = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{framework}') is not None)"
        require(stack.inside("gateway", absent).returncode == 0, f"the gateway image has {framework}")


def main() -> None:
    """Check everything; exit with 1 and the reason on the first promise that does not hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    started = time.monotonic()
    try:
        require_engine()
        with clean_stack() as stack:
            bring_up(stack)
            check_generation(stack, gateway_address(stack))
            check_containers(stack, SERVICES)
    except CheckFailedError as failure:
        sys.exit(f"FAILED: {failure}")
    say(f"all promises held, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
