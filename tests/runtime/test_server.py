"""A real server on loopback: health, errors, tokens, request ids, the end at shutdown."""

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.runtime.toy_service import NAME, ToyService, toy_settings, until
from treewire.errors import (
    Incompatible,
    InternalError,
    InvalidRequest,
    Overloaded,
    TreewireError,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from treewire.health import main as health_main
from treewire.runtime.channel import call_metadata, channel_options, open_channel
from treewire.runtime.endpoint import Endpoint
from treewire.runtime.engine_thread import EngineDied, EngineThread
from treewire.runtime.metrics import Metrics
from treewire.runtime.server import Server, serve

KINDS = ("Unary", "Collect", "Expand", "Chat", "ChatByWriting")


class Running(NamedTuple):
    """A server that listens, and what it counts."""

    server: Server
    metrics: Metrics

    @property
    def address(self) -> str:
        return str(self.server.endpoint)

    def num_rpcs(self, method: str, code: str) -> float | None:
        labels = {"method": f"/{NAME}/{method}", "code": code}
        return self.metrics.registry.get_sample_value("treewire_rpcs_total", labels)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Running]:
    metrics = Metrics("toy")
    async with Server(toy_settings(**settings), register=ToyService().register, services=[NAME], metrics=metrics) as server:
        yield Running(server, metrics)


async def ask(channel: Any, kind: str, order: bytes, **options: Any) -> list[bytes]:
    """Everything that one RPC of this kind answers to `order`; raises what the call ends with, as a TreewireError."""
    path, options = f"/{NAME}/{kind}", {"timeout": 20, **options}
    try:
        match kind:
            case "Unary":
                return [await channel.unary_unary(path)(order, **options)]
            case "Collect":
                return [await channel.stream_unary(path)(iter([order]), **options)]
            case "Expand":
                return [response async for response in channel.unary_stream(path)(order, **options)]
            case _:
                return [response async for response in channel.stream_stream(path)(iter([order]), **options)]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def chat(channel: Any, message: bytes) -> Any:
    """A stream that has echoed its first message and waits for the next."""
    stream = channel.stream_stream(f"/{NAME}/Chat")()
    await stream.write(message)
    assert await stream.read() == message
    return stream


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


@pytest.mark.parametrize("kind", KINDS)
async def test_handlers_of_every_kind_answer(kind: str) -> None:
    """Coroutines and async generators work for unary and streamed messages, and are counted."""
    async with running() as toy, open_channel(toy.address) as channel:
        assert (await ask(channel, kind, b"hello"))[-1] == b"hello"
        assert toy.num_rpcs(kind, "OK") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("order", "expected", "message"),
    [
        (b"overloaded", Overloaded, "4 sessions, 4 is the limit"),
        (b"incompatible", Incompatible, "vocabulary_size: 8 here, 9 there"),
        (b"crash", InternalError, "internal error, see the server's log for request r-1"),
        (b"abort", InvalidRequest, "own words"),
        (b"stray", Unavailable, "the RPC lost what it waited for, try again"),
    ],
)
async def test_errors_reach_the_caller(kind: str, order: bytes, expected: type[TreewireError], message: str) -> None:
    """A TreewireError crosses as itself; a crash is INTERNAL without its text; a stray cancellation ends the call too."""
    async with running() as toy, open_channel(toy.address) as channel:
        with pytest.raises(expected) as failed:
            await ask(channel, kind, order, metadata=call_metadata(request_id="r-1"))
        assert failed.value.message == message
        if order != b"abort":
            assert failed.value.request_id == "r-1"
        await until(lambda: sum(toy.num_rpcs(kind, code.name) or 0 for code in grpc.StatusCode) == 1)  # the caller hears first
        assert toy.num_rpcs(kind, "OK") is None


async def test_error_details_cross_both_stacks() -> None:
    """Metadata, retry time and request id arrive at an asyncio and at a synchronous client alike."""
    async with running() as toy:
        async with open_channel(toy.address) as channel:
            with pytest.raises(Overloaded) as on_asyncio:
                await ask(channel, "Unary", b"overloaded")
        in_sync = await asyncio.to_thread(_ask_in_sync, toy.address)
    for error in (on_asyncio.value, in_sync):
        assert isinstance(error, Overloaded)
        assert (error.metadata, error.retry_after_seconds) == ({"limit": "4"}, 1.5)
        assert error.request_id


def _ask_in_sync(address: str) -> TreewireError:
    with grpc.insecure_channel(address) as channel:
        unary: Any = channel.unary_unary(f"/{NAME}/Unary")
        with pytest.raises(grpc.RpcError) as failed:
            unary(b"overloaded", timeout=20)
    return from_rpc_error(failed.value)


@pytest.mark.parametrize(("sent", "kept"), [("abc-1.2_3", True), ("x" * 65, False), ("two words", False), (None, False)])
async def test_request_ids(sent: str | None, kept: bool) -> None:
    """A sane request id comes back, another is replaced by a new one; the handler knows it."""
    async with running() as toy, open_channel(toy.address) as channel:
        unary: Any = channel.unary_unary(f"/{NAME}/Unary")
        call = unary(b"who", metadata=call_metadata(request_id=sent), timeout=20)
        known = (await call).decode()
        returned = dict(await call.trailing_metadata())["x-request-id"]
    assert known == returned
    assert (returned == sent) is kept


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_is_needed_where_one_is_set(kind: str) -> None:
    """The right token passes; a wrong or missing one is UNAUTHENTICATED and the handler never runs; health stays open."""
    async with running(token="s3cret") as toy:
        async with open_channel(toy.address, token="s3cret") as channel:
            assert (await ask(channel, kind, b"hello"))[-1] == b"hello"
        async with open_channel(toy.address, token="s3cre") as channel:
            with pytest.raises(Unauthenticated, match="the token is wrong"):
                await ask(channel, kind, b"hello")
        async with open_channel(toy.address) as channel:
            with pytest.raises(Unauthenticated, match="no token"):
                await ask(channel, kind, b"hello")
            assert await health_of(channel, "") == "SERVING"
        await until(lambda: toy.num_rpcs(kind, "UNAUTHENTICATED") == 2)


async def test_an_open_door_asks_for_no_token_even_where_one_is_set() -> None:
    """A gateway may show a token to the services behind it and ask its own callers for none."""
    async with running(token="s3cret", allow_anonymous=True) as toy, open_channel(toy.address) as channel:
        assert (await ask(channel, "Unary", b"hello"))[-1] == b"hello"


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    """The handler of a cancelled call ends and is counted as CANCELLED."""
    async with running() as toy, open_channel(toy.address) as channel:
        expand: Any = channel.unary_stream(f"/{NAME}/Expand")
        call = expand(b"hang", timeout=20)
        assert await call.read() == b"first"
        call.cancel()
        await until(lambda: toy.num_rpcs("Expand", "CANCELLED") == 1)


async def test_health_has_two_levels(capsys: pytest.CaptureFixture[str]) -> None:
    """Listening makes the process SERVING; its service follows when announced, with one ready line on stdout."""
    async with running() as toy, open_channel(toy.address) as channel:
        assert (await health_of(channel, ""), await health_of(channel, NAME)) == ("SERVING", "NOT_SERVING")
        await toy.server.announce()
        assert await health_of(channel, NAME) == "SERVING"
        ready = json.loads(capsys.readouterr().out)
        assert (ready["event"], ready["service"], ready["address"]) == ("ready", "toy", toy.address)
        assert toy.server.port == int(toy.address.rpartition(":")[2]) > 0


async def test_drain_lets_streams_finish_and_takes_no_more() -> None:
    """While draining, a running stream goes on to its end, a new call is refused, watchers of health see NOT_SERVING, and
    they do not hold up the end."""
    async with running(grace_seconds=20) as toy, open_channel(toy.address) as channel:
        await toy.server.announce()
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream = await chat(channel, b"before")
        draining = asyncio.create_task(toy.server.drain(asyncio.Event()))
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stream.write(b"while")
        assert await stream.read() == b"while"
        async with open_channel(toy.address) as other:
            with pytest.raises(Unavailable):
                await ask(other, "Unary", b"new")
        assert not draining.done()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        async with asyncio.timeout(10):
            await draining


@pytest.mark.parametrize("hurried", [True, False])
async def test_drain_ends_what_does_not_finish(hurried: bool) -> None:
    """At the end of the grace period, or when hurried, running RPCs end with Unavailable that names the shutdown."""
    async with running(grace_seconds=60 if hurried else 0.1) as toy, open_channel(toy.address) as channel:
        stream = await chat(channel, b"hello")
        hurry = asyncio.Event()
        if hurried:
            hurry.set()
        async with asyncio.timeout(20):
            await toy.server.drain(hurry)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        error = from_rpc_error(ended.value)
        assert isinstance(error, Unavailable)
        assert error.message == "the server is shutting down"


async def test_a_dead_engine_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    """When the engine dies, streams that wait for anything at all fail fast with Unavailable, and serving ends with 1."""

    def step(items: object) -> list[bytes | Exception]:
        raise EngineDied("device lost")

    thread: EngineThread[bytes, bytes] = EngineThread(step, max_batch_size=1, max_queue_length=1, name="toy")
    async with thread as engine:
        settings = toy_settings()
        metrics, toy = Metrics("toy"), ToyService()
        serving = asyncio.create_task(
            serve(settings, register=toy.register, services=[NAME], metrics=metrics, died=engine.died)
        )
        async with open_channel(await _announced(capsys)) as channel:
            stream = await chat(channel, b"hello")
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(Unavailable):
                await engine.submit(b"x")
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert isinstance(from_rpc_error(ended.value), Unavailable)
        async with asyncio.timeout(20):
            assert await serving == 1


async def _announced(capsys: pytest.CaptureFixture[str]) -> str:
    shown: list[str] = []

    def announced() -> bool:
        shown.append(capsys.readouterr().out)
        return bool(shown[-1])

    await until(announced)
    return str(json.loads("".join(shown))["address"])


async def test_a_failing_warm_up_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """A service that cannot warm up is never announced."""

    async def warm_up() -> None:
        raise RuntimeError("no kernel")

    settings = toy_settings()
    toy = ToyService()
    assert await serve(settings, register=toy.register, services=[NAME], metrics=Metrics("toy"), warm_up=warm_up) == 1
    assert capsys.readouterr().out == ""


async def test_a_signal_ends_a_warm_up() -> None:
    """Whoever is asked to stop while it loads stops at once, with 0."""

    async def warm_up() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    toy = ToyService()
    async with asyncio.timeout(20):
        code = await serve(toy_settings(), register=toy.register, services=[NAME], metrics=Metrics("toy"), warm_up=warm_up)
    assert code == 0


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A key, and its certificate for localhost."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=60)
    return key, certificate


async def test_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a certificate the server speaks TLS, to clients and to the health command, and to nobody in clear text."""
    key, certificate = self_signed(tmp_path)
    async with running(bind="localhost:0", tls_certificate_file=certificate, tls_key_file=key, token="s3cret") as toy:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with open_channel(toy.address, token="s3cret", tls=credentials) as channel:
            assert await ask(channel, "Chat", b"hello") == [b"hello"]
        async with open_channel(toy.address, token="s3cret") as channel:
            with pytest.raises(Unavailable):
                await ask(channel, "Unary", b"hello")
        arguments = ["--address", toy.address, "--tls-ca-file", str(certificate)]
        assert await asyncio.to_thread(health_main, arguments) == 0
    assert capsys.readouterr().out.strip() == "SERVING"


async def test_serving_shows_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    """With metrics_bind the process serves /metrics beside its RPCs; a taken port is exit code 1."""
    metrics = Metrics("toy")
    with metrics.listening(Endpoint.parse("127.0.0.1:0")) as taken:
        settings = toy_settings(metrics_bind=str(taken))
        assert await serve(settings, register=ToyService().register, services=[NAME], metrics=Metrics("toy")) == 1
    died = asyncio.Event()
    serving = asyncio.create_task(serve(settings, register=ToyService().register, services=[NAME], metrics=metrics, died=died))
    await _announced(capsys)
    shown = await asyncio.to_thread(urllib.request.urlopen, f"http://{taken}/metrics", timeout=20)
    assert b"treewire_service_info" in shown.read()
    died.set()
    assert await serving == 1


async def test_a_taken_port_is_refused() -> None:
    """Two servers never share a port; the second says so."""
    async with running() as toy:
        settings = toy_settings(bind=toy.address)
        with pytest.raises(OSError, match=f"cannot listen on {toy.address}"):
            async with Server(settings, register=ToyService().register, services=[NAME], metrics=Metrics("toy")):
                pytest.fail("two servers share a port")


async def test_unix_sockets(tmp_path: Path) -> None:
    """A server listens on a path as well."""
    async with running(bind=f"unix:{tmp_path}/toy.sock") as toy, open_channel(toy.address) as channel:
        assert await ask(channel, "Unary", b"hello") == [b"hello"]


@pytest.mark.parametrize(("setting", "listed"), [("auto", True), ("on", True), ("off", False)])
async def test_reflection(setting: str, listed: bool) -> None:
    """On loopback reflection lists the services, unless it is off."""
    async with running(reflection=setting) as toy, open_channel(toy.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20)
        if not listed:
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
            return
        assert NAME in [service.name async for answer in call for service in answer.list_services_response.service]


async def test_messages_up_to_the_limit_pass() -> None:
    """5 MiB, more than gRPC's own default of 4, pass both ways; past the set limit it is RESOURCE_EXHAUSTED."""
    async with running() as toy, open_channel(toy.address) as channel:
        large = bytes(5 * 2**20)
        assert await ask(channel, "Unary", large) == [large]
    async with running(max_message_bytes=4096) as toy, open_channel(toy.address) as channel:
        with pytest.raises(Overloaded, match="4096"):
            await ask(channel, "Unary", large)


async def test_a_client_may_ping_through_a_long_silence() -> None:
    """A call that is silent for 25 s survives our own client, which pings every 10 s, and one that pings every 5.5 s: more
    pings than gRPC's default lets pass. The channels stay usable."""
    assert ("grpc.keepalive_time_ms", 10_000) in channel_options()
    eager = [(name, 5_500 if name == "grpc.keepalive_time_ms" else value) for name, value in channel_options()]
    async with running() as toy:
        channels = (open_channel(toy.address), grpc.aio.insecure_channel(toy.address, options=eager))
        calls = (ask(channel, "Unary", b"silent", timeout=60) for channel in channels)
        assert await asyncio.gather(*calls) == [[b"silent"]] * 2
        for channel in channels:
            assert await ask(channel, "Unary", b"after") == [b"after"]
            await channel.close()


async def test_rpcs_wait_for_a_starved_event_loop() -> None:
    """A loop that gets no time for 32 s, longer than gRPC keeps what nobody takes: whoever called meanwhile is answered."""

    def unary(number: int) -> bytes:
        with grpc.insecure_channel(toy.address, [*channel_options(), ("test.a_connection_of_its_own", number)]) as channel:
            return bytes(channel.unary_unary(f"/{NAME}/Unary")(b"%d" % number, timeout=120))

    async with running() as toy:
        with ThreadPoolExecutor(max_workers=6) as callers:
            answers = [callers.submit(unary, number) for number in range(6)]
            time.sleep(32)  # noqa: ASYNC251 - this is the starved loop
            answered = await asyncio.gather(*map(asyncio.wrap_future, answers))
    assert answered == [b"%d" % number for number in range(6)]


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        ([], 0, "SERVING"),
        (["--service", NAME], 1, "NOT_SERVING"),
        (["--service", "toy.v1.Unknown"], 1, "SERVICE_UNKNOWN"),
    ],
)
async def test_the_health_command(arguments: list[str], code: int, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the status and succeeds only for SERVING, without the token of the server."""
    async with running(token="s3cret") as toy:
        assert await asyncio.to_thread(health_main, ["--address", toy.address, *arguments]) == code
    assert capsys.readouterr().out.strip() == output


def test_the_health_command_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody there is 1, no address is 2."""
    assert health_main(["--address", "127.0.0.1:1", "--timeout", "2"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().out
    for wrong in ([], ["--address", "nowhere"]):
        with pytest.raises(SystemExit) as exited:
            health_main(wrong)
        assert exited.value.code == 2


def test_metrics_are_shown_over_http() -> None:
    """While listening, /metrics shows what was counted; afterwards the port is closed."""
    metrics = Metrics("toy")
    metrics.rpcs.labels("/toy", "OK").inc()
    with metrics.listening(Endpoint.parse("127.0.0.1:0")) as endpoint:
        shown = urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=20).read().decode()
    assert 'treewire_rpcs_total{code="OK",method="/toy"} 1.0' in shown
    assert 'treewire_service_info{service="toy"} 1.0' in shown
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=20)
