"""The stack: three processes that start together, are watched, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from treewire import AsyncClient
from treewire.stack import Service, Stack, StackError, StackOptions, State, service_command

from .fake_service import TEXT

FAKE_SERVICE = Path(__file__).parent / "fake_service.py"
ROOT = Path(__file__).parents[2]
SOON_SECONDS = 60.0


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty current folder, from which the fake services find the package; nothing runs there afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    deadline = time.monotonic() + SOON_SECONDS  # a kill is sent before the process is gone
    while any(is_alive(worker) for worker in workers(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [worker for worker in workers(tmp_path) if is_alive(worker)] == []


def workers(folder: Path) -> list[int]:
    """The processes that the fake services started."""
    return [int(path.read_text()) for path in folder.glob("*.worker")]


def is_alive(pid: int) -> bool:
    """True for a process that runs; one that has ended may wait for its parent to notice."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def fake(service, flags):
    """The command line of a fake service."""
    return (sys.executable, str(FAKE_SERVICE), service.value, *flags)


def stack(tmp_path, *, grace_seconds=5.0, start_timeout_seconds=SOON_SECONDS, on_event=lambda event: None, **options):
    """A stack of fake services."""
    return Stack(
        StackOptions(target="simulated", port=0, logs=tmp_path / "logs", **options),
        command=fake,
        grace_seconds=grace_seconds,
        start_timeout_seconds=start_timeout_seconds,
        on_event=on_event,
    )


def flags_of(folder, service):
    """The flags that a fake service got."""
    return json.loads((folder / f"{service}.log").read_text().splitlines()[0])


async def test_a_stack_serves_and_leaves_nothing(tmp_path):
    """Inside the block the gateway answers; after it every process and its workers are gone."""
    seen = []
    async with stack(tmp_path, on_event=seen.append) as running:
        pids = running.pids
        async with AsyncClient(running.address) as client:
            assert (await client.generate("Hi")).text == TEXT
        assert set(pids) == set(Service)
        assert len(workers(tmp_path)) == 3
    assert not any(is_alive(pid) for pid in pids.values())
    assert {(event.service, event.state) for event in seen} == {
        (service, state) for service in Service for state in (State.STARTING, State.SERVING)
    }


async def test_the_gateway_gets_the_addresses_of_the_others(tmp_path):
    """Ports are the services' own choice, and known from their ready lines; other output stays with the log."""
    async with stack(tmp_path, budget=8) as running:
        flags = flags_of(running.logs, "gateway")
    upstreams = {name: int(flags[flags.index(f"--{name}") + 1].rpartition(":")[2]) for name in ("draft", "verify")}
    assert all(port > 0 for port in upstreams.values())
    assert flags[flags.index("--budget") + 1] == "8"
    assert "a line that is not the ready line" in (running.logs / "verify.log").read_text()


async def test_without_a_drafter_there_is_no_draft_process(tmp_path):
    """`none` starts two processes and tells the gateway of no draft address."""
    async with stack(tmp_path, drafter="none") as running:
        assert set(running.pids) == {Service.VERIFY, Service.GATEWAY}
        flags = flags_of(running.logs, "gateway")
    assert flags[flags.index("--draft") + 1] == ""


@pytest.mark.parametrize("service", ["draft", "verify", "gateway"])
async def test_a_service_that_dies_early_stops_all(tmp_path, monkeypatch, service):
    """The error names the service, its exit status and its last log lines; the others are gone (workplace checks)."""
    monkeypatch.setenv(f"FAKE_{service.upper()}", "dies")
    with pytest.raises(StackError, match=f"{service} exited with status 3") as caught:
        await stack(tmp_path).__aenter__()
    assert caught.value.log_tail[-1] == f"{service} has no weights"


async def test_a_service_that_never_serves_is_an_error(tmp_path, monkeypatch):
    """Listening is not serving: the wait ends with the time that was given."""
    monkeypatch.setenv("FAKE_VERIFY", "never")
    with pytest.raises(StackError, match="verify did not serve within 3 s"):
        await stack(tmp_path, drafter="none", start_timeout_seconds=3.0).__aenter__()


async def test_a_service_that_is_deaf_is_killed(tmp_path, monkeypatch):
    """SIGTERM, a grace, then SIGKILL."""
    monkeypatch.setenv("FAKE_VERIFY", "deaf")
    async with stack(tmp_path, drafter="none", grace_seconds=0.5) as running:
        pid = running.pids[Service.VERIFY]
    assert not is_alive(pid)


async def test_a_clean_up_that_is_cancelled_kills_at_once(tmp_path, monkeypatch):
    """A second Ctrl-C does not wait for the grace to pass."""
    monkeypatch.setenv("FAKE_VERIFY", "deaf")
    running = await stack(tmp_path, drafter="none", grace_seconds=600.0).__aenter__()
    process = psutil.Process(running.pids[Service.VERIFY])
    leaving = asyncio.create_task(running.__aexit__(None, None, None))
    await asyncio.wait((leaving,), timeout=1.0)
    leaving.cancel()
    await asyncio.wait((leaving,))
    assert leaving.cancelled()
    await asyncio.to_thread(psutil.wait_procs, [process], SOON_SECONDS)
    assert not process.is_running()


@pytest.mark.parametrize("service", [Service.VERIFY, Service.GATEWAY])
async def test_losing_verify_or_the_gateway_ends_the_watch(tmp_path, service):
    """`wait` raises with the signal that ended the service."""
    async with stack(tmp_path) as running:
        waiting = asyncio.create_task(running.wait())
        os.kill(running.pids[service], signal.SIGKILL)
        with pytest.raises(StackError, match=f"{service.value} was ended by signal 9"):
            await asyncio.wait_for(waiting, SOON_SECONDS)


async def test_a_lost_draft_service_is_started_again_where_it_was(tmp_path):
    """The draft service comes back at the address the gateway knows; the watch goes on."""
    served_again, seen = asyncio.Event(), []

    def on_event(event):
        seen.append(event)
        if sum((service, state) == (Service.DRAFT, State.SERVING) for service, state, _ in seen) == 2:
            served_again.set()

    async with stack(tmp_path, on_event=on_event) as running:
        waiting = asyncio.create_task(running.wait())
        os.kill(running.pids[Service.DRAFT], signal.SIGKILL)
        await asyncio.wait_for(served_again.wait(), SOON_SECONDS)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait((waiting,))
    addresses = [event.detail for event in seen if event[:2] == (Service.DRAFT, State.SERVING)]
    assert addresses[0] == addresses[1]
    assert "signal 9" in next(event.detail for event in seen if event.state is State.RESTARTING)


async def test_a_taken_port_is_told_before_anything_starts(tmp_path):
    """The message has the port and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StackError, match=f"port {port} of 127.0.0.1 is taken"):
            await Stack(StackOptions(port=port), command=fake).__aenter__()
    assert workers(tmp_path) == []


async def test_logs_of_a_stack_that_ended_well_are_removed(tmp_path):
    """A log folder of its own making goes with a clean end; a folder that was named stays."""
    async with Stack(StackOptions(target="simulated", port=0, drafter="none"), command=fake) as running:
        assert (running.logs / "verify.log").exists()
    assert not running.logs.exists()
    async with stack(tmp_path, drafter="none") as named:
        pass
    assert (named.logs / "verify.log").exists()


async def test_logs_are_those_of_one_stack(tmp_path):
    """A folder that is used again has nothing of the stack before, so that a log's last lines tell of this one."""
    for _ in range(2):
        async with stack(tmp_path, drafter="none") as running:
            pass
    assert (running.logs / "verify.log").read_text().count("--bind") == 1


def test_drafters_of_features_are_told_both_sides(tmp_path):
    """The checkpoint goes to the draft service with its target, and to the verify service as projection; "dflash" is the one
    that is shipped for the target, and a directory says by its config what it holds."""
    shipped = StackOptions(target="smollm2-135m", drafter="dflash")
    assert StackOptions(target="smollm2-135m").draft_flags("a:1") == shipped.draft_flags("a:1")
    assert StackOptions(target="some/other").draft_flags("a:1") == ("--bind", "a:1", "--engine", "ngram")
    assert shipped.draft_flags("h:0")[2:] == ("--engine", "dflash", "--model", "smollm2-135m", "--target", "smollm2-135m")
    assert shipped.verify_flags()[-2:] == ("--feature-projection", "smollm2-135m")
    for number, config in enumerate(({"architectures": ["DFlashDraftModel"]}, {"architecture": "treewire-recurrent"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        own = StackOptions(target="smollm2-135m", drafter=str(folder))
        assert own.draft_flags("h:0")[2:] == ("--engine", "dflash", "--model", str(folder), "--target", "smollm2-135m")
        assert own.verify_flags()[-2:] == ("--feature-projection", str(folder))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    other = StackOptions(target="smollm2-135m", drafter=str(tmp_path))
    assert other.draft_flags("h:0")[2:] == ("--engine", "causal-lm", "--model", str(tmp_path))
    assert "--feature-projection" not in other.verify_flags()


def test_flags_are_those_of_the_services():
    """What each service is started with, by target and drafter."""
    simulated = StackOptions(target="simulated", drafter="simulated")
    assert simulated.draft_flags("h:0") == ("--bind", "h:0", "--engine", "simulated")
    assert simulated.verify_flags() == ("--bind", "127.0.0.1:0", "--engine", "simulated")
    model = StackOptions(target="smollm2-135m", drafter="models/small", threads=2, port=9)
    assert model.draft_flags("h:0")[2:] == ("--engine", "causal-lm", "--model", "models/small")
    assert model.verify_flags()[2:] == (
        *("--engine", "transformers", "--model", "smollm2-135m", "--dtype", "float32"),
        *("--threads", "2"),
    )
    assert model.gateway_flags("d:1", "v:2") == (
        *("--bind", "127.0.0.1:9", "--model", "smollm2-135m", "--draft", "d:1", "--verify", "v:2"),
    )
    beamed = StackOptions(target="smollm2-135m", drafter="dflash", beam=2)
    assert beamed.draft_flags("h:0")[-4:] == ("--target", "smollm2-135m", "--beam", "2")
    assert service_command(Service.DRAFT, ("--bind", "x"))[1:] == (
        *("-m", "draft_service", "--bind", "x", "--exit-with-parent", "--log-format", "json"),
    )


@pytest.mark.parametrize(("options", "message"), [({"port": 65536}, "65536"), ({"budget": -1}, "-1"), ({"threads": 0}, "0")])
def test_options_out_of_range_are_refused(options, message):
    """Each message has the value and the limit."""
    with pytest.raises(ValueError, match=message):
        StackOptions(**options)
