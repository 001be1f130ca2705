"""The command line, as its users run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import treewire
from treewire import errors
from treewire.testing import FakeGateway, Reply
from treewire.v1 import generate_pb2, generate_pb2_grpc

from .fake_service import TEXT
from .gateways import chunk, started

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SOON_SECONDS = 60.0
JSON_KEYS = [
    *("text", "token_ids", "finish_reason", "rounds", "mean_acceptance_length"),
    *("ttft_seconds", "tokens_per_second", "stage_seconds", "lone_roots"),
]


def start(*arguments, folder=ROOT, **environment):
    """Starts the program."""
    paths = os.pathsep.join((str(folder), str(ROOT), str(TESTS)))
    return subprocess.Popen(
        [sys.executable, "-m", "treewire", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1", **environment},
        text=True,
    )


def run(*arguments, given="", **options):
    """Runs the program to its end: exit status, standard output, standard error."""
    with start(*arguments, **options) as process:
        out, err = process.communicate(given, timeout=SOON_SECONDS)
    return process.returncode, out, err


def test_generate_prints_the_text():
    """The text goes to standard output, and nothing else does; the options go into the request."""
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.125 --seed 3 --stop a --stop b --budget 0"
    with FakeGateway("Hello there.") as gateway:
        assert run("generate", "Hi", "--system", "Be brief", "--address", gateway.address, *options.split()) == (
            *(0, "Hello there.\n", ""),
        )
    (request,) = gateway.requests
    assert [turn.content for turn in request.chat.messages] == ["Be brief", "Hi"]
    assert (request.max_tokens, request.budget, list(request.stop)) == (5, 0, ["a", "b"])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 7, 0.125, 3)
    assert sampling.top_p == pytest.approx(0.9)


@pytest.mark.parametrize("option", ["json-schema", "regex", "grammar"])
def test_generate_takes_what_the_answer_must_match(option, tmp_path):
    """A schema and a grammar from their files, an expression as it is."""
    said = '{"type": "object"}'
    (tmp_path / "said").write_text(said)
    with FakeGateway("{}") as gateway:
        given = said if option == "regex" else str(tmp_path / "said")
        assert run("generate", "Hi", f"--{option}", given, "--address", gateway.address) == (0, "{}\n", "")
    (request,) = gateway.requests
    assert getattr(request, request.WhichOneof("structure")) == said
    assert request.WhichOneof("structure") == option.replace("-", "_")


def test_generate_prints_json():
    """One object with exactly the agreed keys."""
    with FakeGateway(Reply((("a", (1, 2)), ("b", (3,))), finish_reason="length")) as gateway:
        status, out, err = run("generate", "Hi", "--json", TREEWIRE_ADDRESS=gateway.address)
    assert (status, err) == (0, "")
    summary = json.loads(out)
    assert list(summary) == JSON_KEYS
    assert (summary["text"], summary["token_ids"], summary["finish_reason"]) == ("ab", [1, 2, 3], "length")
    assert (summary["rounds"], summary["mean_acceptance_length"], summary["lone_roots"]) == (2, 1.0, 2)


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_generate_reads_standard_input(prompt):
    """Piped text is the prompt, and --raw continues it as it is."""
    with FakeGateway("ok") as gateway:
        status, _, err = run("generate", *prompt, "--raw", "--address", gateway.address, given="Once upon")
    assert (status, err) == (0, "")
    assert gateway.requests[0].text == "Once upon"


def test_an_error_is_one_line_with_value_and_limit():
    """What the server says is told on standard error, with status 1."""
    error = errors.InvalidRequest("prompt has 0 characters,\nat least 1 is needed")
    with FakeGateway(error) as gateway:
        assert run("generate", "", "--address", gateway.address) == (
            *(1, "", "error: prompt has 0 characters, at least 1 is needed\n"),
        )


def test_no_gateway_is_an_error():
    """An address where nobody listens ends with status 1 and one line."""
    status, out, err = run("generate", "Hi", "--address", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["generate", "Hi", "--max-tokens", "many"], ["generate", "Hi", "--raw", "--system", "x"], ["up", "--port", "70000"]],
)
def test_wrong_usage_is_status_2(arguments):
    """What cannot be meant is told before anything is called or started."""
    status, out, _ = run(*arguments)
    assert (status, out) == (2, "")


class Endless(generate_pb2_grpc.GenerateServiceServicer):
    """Sends one word, then nothing, until the caller leaves."""

    def __init__(self):
        self.caller_left = threading.Event()

    def Generate(self, request, context):
        context.add_callback(self.caller_left.set)
        yield started()
        yield chunk("word ", 1)
        self.caller_left.wait()

    def GetModel(self, request, context):
        return generate_pb2.GetModelResponse()


def test_ctrl_c_cancels_the_call():
    """A Ctrl-C in mid-stream cancels the call and ends with status 130, the text so far printed."""
    endless = Endless()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(endless, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with start("generate", "Hi", "--address", f"127.0.0.1:{port}") as process:
            assert process.stdout.read(5) == "word "
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=SOON_SECONDS)
        assert (process.returncode, err) == (130, "")
        assert endless.caller_left.wait(SOON_SECONDS)
    finally:
        endless.caller_left.set()
        server.stop(None).wait()


def test_version():
    """Both spellings print it."""
    assert run("version") == run("--version") == (0, f"treewire {treewire.__version__}\n", "")


@pytest.fixture
def fake_services(tmp_path):
    """A folder where the three services are fakes."""
    for name, module in {"draft": "draft_service", "verify": "verify_service", "gateway": "gateway"}.items():
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
        main = f"import sys\nfrom sdk.fake_service import main\nmain({name!r}, sys.argv[1:])\n"
        (tmp_path / module / "__main__.py").write_text(main)
    return tmp_path


def test_demo_shows_the_text_and_how_speculation_went(fake_services):
    """Up, one prompt, a table, down: status 0."""
    status, out, err = run("demo", "--target", "simulated", "--drafter", "simulated", folder=fake_services)
    assert status == 0, err
    assert out.startswith(TEXT)
    for measure in ("rounds", "mean acceptance length", "lone roots", "tokens per second", "time to first token"):
        assert measure in out
    assert "gateway serving at" in err
    assert "goaway" not in err.lower()


def test_demo_prints_json(fake_services):
    """The object of generate --json alone."""
    status, out, err = run("demo", "--json", "--drafter", "none", folder=fake_services)
    assert status == 0, err
    assert list(json.loads(out)) == JSON_KEYS


def test_demo_tells_of_a_service_that_dies(fake_services):
    """Status 1, the last lines of the service's log, and which service it was."""
    status, _, err = run("demo", "--logs", "logs", folder=fake_services, FAKE_VERIFY="dies")
    assert status == 1
    assert "verify has no weights" in err
    assert "error: verify exited with status 3; its log is logs/verify.log" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_the_stack(fake_services, number):
    """`up` runs until Ctrl-C or SIGTERM, then ends with status 0; no service is left to answer."""
    with start("up", "--port", "0", "--http-port", "0", "--target", "simulated", folder=fake_services) as process:
        line = next(line for line in process.stderr if line.startswith("gateway at "))
        address = line.split()[2].rstrip(",")
        assert run("health", "--address", address)[:2] == (0, "SERVING\n")
        process.send_signal(number)
        process.communicate(timeout=SOON_SECONDS)
    assert process.returncode == 0
    assert run("health", "--address", address)[0] == 1


def test_a_taken_port_is_told(fake_services):
    """`up` on a port that is taken ends with status 1 and says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = run("up", "--port", str(port), "--no-http", folder=fake_services)
    assert status == 1
    assert f"error: port {port} of 127.0.0.1 is taken" in err
