"""The HTTP door: every route refuses what is wrong with a request in the one form that clients expect, and lives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from gateway.openai.document import OPERATIONS
from tests.doors.eventually import eventually
from tests.system.local_stack import MODEL as SIMULATED
from tests.system.local_stack import LocalStack, local_stack
from treewire import AsyncClient
from treewire.errors import InvalidRequest, Overloaded, Unauthenticated
from treewire.runtime import interceptors
from treewire.runtime.calls import Call, Trace, answering
from verify_service.engines.simulated import SimulatedTarget

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TURN = {"role": "user", "content": "Hi"}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN], "max_tokens": 2},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [300, 301]},
}


class Rig(NamedTuple):
    """A stack and a client of its HTTP door."""

    stack: LocalStack
    http: httpx.AsyncClient


@asynccontextmanager
async def rig(*args: Any, **options: Any) -> AsyncIterator[Rig]:
    async with (
        local_stack(*args, http_bind="127.0.0.1:0", **options) as stack,
        httpx.AsyncClient(base_url=stack.http_url, timeout=20, trust_env=False) as http,
    ):
        yield Rig(stack, http)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a response of this status, whose form is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


async def test_every_route_answers_what_is_asked_right() -> None:
    """Valid requests of every route of the document are answered with 200."""
    async with rig() as (_, http):
        for operation in OPERATIONS:
            response = await http.request(operation.method, operation.path, json=VALID.get(operation.path))
            assert response.status_code == 200, operation.path
            assert response.headers["x-request-id"]


async def test_routes_refuse_other_methods_and_unknown_paths() -> None:
    """405 with the methods that are taken, and 404, in the one form."""
    async with rig() as (_, http):
        for operation in OPERATIONS:
            response = await http.request("DELETE", operation.path)
            assert error_of(response, 405)["code"] == "method_not_allowed"
            assert operation.method.upper() in response.headers["allow"]
        for path in ("/", "/v1", "/v1/chat/completions/", "/v1/models/other", "/..%2f..%2fetc/passwd"):
            assert error_of(await http.get(path), 404)["code"] == "not_found"


@pytest.mark.parametrize("path", VALID)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body cannot be read: Invalid JSON"),
        (b"{", "the body cannot be read: Invalid JSON"),
        (b"\xff\xfe", "the body cannot be read: Invalid JSON"),
        (b"[]", "the body cannot be read: Input should be an object"),
        (b"null", "the body cannot be read: Input should be an object"),
        (b'{"surprise": 1}', ""),
        (b'{"model": "\\ud800"}', "the body cannot be read: Invalid JSON"),
        (b"[" * 100_000, "the body cannot be read: Invalid JSON"),
    ],
)
async def test_body_that_is_none_is_400(path: str, content: bytes, message: str) -> None:
    """Whatever bytes come as JSON, the answer is 400 and says why."""
    async with rig() as (_, http):
        response = await http.post(path, content=content, headers={"content-type": "application/json"})
        error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize("path", VALID)
async def test_body_of_another_type_or_size_is_refused(path: str) -> None:
    """415 for what is not JSON, 413 for what is too large, however it is sent."""
    async with rig(max_message_bytes=4096) as (_, http):
        assert error_of(await http.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415)["code"]
        assert error_of(await http.post(path, content=b"{}"), 415)["code"] == "unsupported_media_type"

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b" " * 1000

        headers = {"content-type": "application/json"}
        for content in (b" " * 10_000, pieces()):
            assert error_of(await http.post(path, content=content, headers=headers), 413)["code"] == "body_too_large"
        assert (await http.post(path, json=VALID[path])).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (CHAT, {}, "messages", "messages: Field required"),
        (CHAT, {"messages": []}, "messages", "messages: List should have at least 1 item"),
        (
            CHAT,
            {"messages": [{"role": "wizard", "content": "a"}]},
            "messages[0].role",
            "Input should be 'system', 'developer', 'user' or 'assistant'",
        ),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages", "0 characters long"),
        (CHAT, {"messages": [TURN], "surprise": 1}, "surprise", "this field is not known"),
        (CHAT, {"messages": [TURN], "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {"messages": [TURN], "max_tokens": "many"}, "max_tokens", "valid integer"),
        (CHAT, {"messages": [TURN], "temperature": -1}, "temperature", "temperature is -1.0, it must be from 0.0 to 100.0"),
        (CHAT, {"messages": [TURN], "top_p": 0}, "top_p", "top_p is 0, it must be above 0"),
        (CHAT, {"messages": [TURN], "stop": [""]}, "stop", "stop is a string of 0 characters"),
        (CHAT, {"messages": [TURN], "stop": ["a"] * 17}, "stop", "stop is 17 strings long, at most 16 are taken"),
        (CHAT, {"messages": [TURN], "stop_token_ids": [99999]}, "stop_token_ids", "stop_token_ids is 99999"),
        (CHAT, {"messages": [TURN], "budget": 100000}, "budget", "budget is 100000, from 0 to 256 is taken"),
        (CHAT, {"messages": [TURN], "tools": [{"type": "function"}]}, "tools", "tools is not served"),
        (CHAT, {"messages": [TURN], "stream_options": {}}, "stream_options", "stream_options goes with stream"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt", "prompt has 2 prompts, 1 is taken"),
        (COMPLETIONS, {"prompt": []}, "prompt", "tokens has 0 tokens"),
        (COMPLETIONS, {"prompt": [5000]}, "prompt", "tokens has token 5000"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "text is 0 characters long"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo", "echo is not served"),
        ("/tokenize", {}, "prompt", "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": [TURN]}, "prompt", "exactly one of prompt and messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        ("/detokenize", {"tokens": [99999]}, "tokens[0]", "tokens[0] is 99999, the vocabulary has ids from 0 to 1023"),
    ],
)
async def test_wrong_field_is_400_with_its_name(path: str, body: dict[str, Any], param: str, message: str) -> None:
    """The parameter, the value and the limit, for programs and for people."""
    async with rig() as (_, http):
        error = error_of(await http.post(path, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


async def test_prompt_beyond_the_context_has_openai_s_code() -> None:
    """Programs that shorten prompts look for it."""
    async with rig(max_prompt_tokens=10) as (_, http):
        error = error_of(await http.post(COMPLETIONS, json={"prompt": "the " * 20}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "from 1 to 10 are taken" in error["message"]


async def test_model_that_is_not_served_is_404() -> None:
    """With the name that is."""
    async with rig() as (_, http):
        for path, body in VALID.items():
            error = error_of(await http.post(path, json={**body, "model": "gpt-6"}), 404)
            assert error["code"] == "model_not_found"
            assert "under-test" in error["message"]


KEYS = """
[alice]
key = "alice-secret"
max_running = 1
max_tokens = 300
max_prompt_tokens = 30

[bob]
key = "bob-secret"
requests_per_minute = 2
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Two callers with limits."""
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return file


async def test_playground_is_served_and_its_generations_want_a_key(keys_file: Path) -> None:
    """The page and its files are open, what it asks of the model is not; with a key it gets a generation."""
    async with rig(keys_file=keys_file) as (_, http):
        page = await http.get("/playground/")
        assert page.status_code == 200
        assert "text/html" in page.headers["content-type"]
        body = {"chat": {"messages": [TURN]}, "maxTokens": 2}
        assert error_of(await http.get("/playground/model"), 401)
        assert error_of(await http.post("/playground/generate", json=body), 401)
        assert (await http.get("/playground/model", headers=bearer("bob-secret"))).status_code == 200
        told = await http.post("/playground/generate", json=body, headers=bearer("bob-secret"))
        assert told.status_code == 200
        assert "data: " in told.text


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_a_key_only_health_is_told(keys_file: Path) -> None:
    """401 with a challenge on every other route, the same whether the path exists or not; and on every RPC."""
    async with rig(keys_file=keys_file) as (stack, http), stack.client() as client:
        for headers in ({}, bearer("wrong"), {"authorization": "Basic YTpi"}):
            for operation in OPERATIONS:
                response = await http.request(operation.method, operation.path, json=VALID.get(operation.path), headers=headers)
                if operation.needs_key:
                    assert error_of(response, 401)["type"] == "authentication_error"
                    assert response.headers["www-authenticate"] == "Bearer"
                else:
                    assert response.status_code == 200
            assert error_of(await http.get("/nowhere", headers=headers), 401)
        with pytest.raises(Unauthenticated):
            await client.generate("Hi")
        with pytest.raises(Unauthenticated):
            await client.model()
        assert (await http.get("/v1/models", headers=bearer("alice-secret"))).status_code == 200


async def test_limits_of_a_key_hold_at_both_doors_together(keys_file: Path) -> None:
    """Tokens, prompt and generations at once are the caller's own, whichever door it takes."""
    async with (
        rig(SimulatedTarget(SIMULATED, step_seconds=0.01), keys_file=keys_file) as (stack, http),
        AsyncClient(stack.address, token="alice-secret") as client,
    ):
        headers = bearer("alice-secret")
        error = error_of(await http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 301}, headers=headers), 400)
        assert error["param"] == "max_tokens"
        with pytest.raises(InvalidRequest, match="max_tokens is 301, at most 300 are taken"):
            await client.generate("Hi", max_tokens=301)
        with pytest.raises(InvalidRequest, match="from 1 to 30 are taken"):
            await client.generate(text="the " * 31)
        running = asyncio.create_task(client.generate("Hi", max_tokens=200, ignore_end=True))
        await eventually(lambda: stack.num_sessions == (1, 1))
        response = await http.post(COMPLETIONS, json=VALID[COMPLETIONS], headers=headers)
        assert error_of(response, 429)["code"] == "overloaded"
        assert "1 generations of alice run or wait, its limit is 1" in response.text
        assert int(response.headers["retry-after"]) >= 1
        with pytest.raises(Overloaded) as caught:
            await client.generate("Hi", max_tokens=2)
        assert caught.value.retry_after_seconds
        assert (await http.post(COMPLETIONS, json=VALID[COMPLETIONS], headers=bearer("bob-secret"))).status_code == 200
        await running
        assert (await http.post(COMPLETIONS, json=VALID[COMPLETIONS], headers=headers)).status_code == 200


async def test_rate_of_a_key_is_limited(keys_file: Path) -> None:
    """The third start within a minute is refused, with the seconds until the next may."""
    async with rig(keys_file=keys_file) as (_, http):
        for _ in range(2):
            await http.post(COMPLETIONS, json=VALID[COMPLETIONS], headers=bearer("bob-secret"))
        response = await http.post(COMPLETIONS, json=VALID[COMPLETIONS], headers=bearer("bob-secret"))
    assert error_of(response, 429)
    assert 1 <= int(response.headers["retry-after"]) <= 60


async def test_keys_are_read_again_when_the_file_changes(keys_file: Path) -> None:
    """A new key opens at once, a removed one no longer; a broken file changes nothing."""
    async with rig(keys_file=keys_file) as (_, http):
        assert (await http.get("/version", headers=bearer("carol-secret"))).status_code == 401
        keys_file.write_text('[carol]\nkey = "carol-secret"\n')
        assert (await http.get("/version", headers=bearer("carol-secret"))).status_code == 200
        assert (await http.get("/version", headers=bearer("alice-secret"))).status_code == 401
        keys_file.write_text("[carol\n")
        assert (await http.get("/version", headers=bearer("carol-secret"))).status_code == 200


async def test_request_id_and_trace_of_the_caller_reach_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """One id in the answer, in its own id, and in the calls that target and drafter answer; nonsense gets a new one."""
    calls: list[Call] = []

    @contextmanager
    def recorded(call: Call) -> Iterator[None]:
        calls.append(call)
        with answering(call):
            yield

    monkeypatch.setattr(interceptors, "answering", recorded)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with rig() as (_, http):
        headers = {"x-request-id": "shop-7", "traceparent": trace, "tracestate": "shop=1"}
        response = await http.post(COMPLETIONS, json=VALID[COMPLETIONS], headers=headers)
        assert response.headers["x-request-id"] == "shop-7"
        assert response.json()["id"] == "cmpl-shop-7"
        nonsense = await http.get("/version", headers={"x-request-id": "a b" + "c" * 100, "traceparent": "00-none"})
        assert len(nonsense.headers["x-request-id"]) == 32
    of_request = [call for call in calls if call.request_id == "shop-7"]
    assert len(of_request) == 4, "each of two services answers one stream: before and after the caller is known"
    assert {call.trace for call in of_request} == {Trace(trace, "shop=1")}


async def test_not_ready_before_the_target_was_met_and_while_draining() -> None:
    """Alive at once, ready only while generations are taken; draining ends what runs after the grace period."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.02)) as (stack, http):
        assert stack.door is not None
        assert (await http.get("/ready")).status_code == 200
        body = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True}
        running = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await eventually(lambda: stack.num_sessions == (1, 1))
        await stack.door.drain(asyncio.Event(), 0.3)
        assert not stack.door.is_ready
        error = error_of(await running, 503)
        assert error["code"] == "unavailable"
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")
        await eventually(lambda: stack.num_sessions == (0, 0))


async def test_draining_ends_a_stream_with_an_event() -> None:
    """Whoever reads a stream at the end of the grace period is told why it ends."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.02)) as (stack, http):
        assert stack.door is not None
        body = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        running = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await eventually(lambda: stack.num_sessions == (1, 1))
        await asyncio.sleep(0.3)
        await stack.door.drain(asyncio.Event(), 0.2)
        events = [line.removeprefix("data: ") for line in (await running).text.splitlines() if line]
        assert len(events) > 2
        assert json.loads(events[-1])["error"]["code"] == "unavailable"
        await eventually(lambda: stack.num_sessions == (0, 0))


async def test_draining_lets_a_generation_finish_within_the_grace_period() -> None:
    """What runs comes to its end."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.005)) as (stack, http):
        assert stack.door is not None
        running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "go on", "max_tokens": 60, "ignore_eos": True}))
        await eventually(lambda: stack.num_sessions == (1, 1))
        await stack.door.drain(asyncio.Event(), 20.0)
        assert (await running).json()["usage"]["completion_tokens"] == 60


async def test_callers_without_a_key_are_told_apart_by_where_they_call_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd from one address, over either door, delays a caller from another one by a single turn."""
    entered: list[str] = []
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.01), max_running=1) as (stack, http):
        place = stack.gateway.admission.place

        @asynccontextmanager
        async def recorded(key: str = "", remaining_seconds: float | None = None) -> AsyncIterator[None]:
            async with place(key, remaining_seconds):
                entered.append(key)
                yield

        monkeypatch.setattr(stack.gateway.admission, "place", recorded)
        body = {"prompt": "go on", "max_tokens": 40, "ignore_eos": True}
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with (
            httpx.AsyncClient(base_url=stack.http_url, timeout=20, transport=elsewhere) as other,
            stack.client() as client,
        ):
            crowd = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for _ in range(4)]
            crowd.append(asyncio.create_task(client.generate("go on", max_tokens=40)))
            await eventually(lambda: stack.gateway.admission.num_queued == 4)
            assert (await other.post(COMPLETIONS, json=body)).status_code == 200
            await asyncio.gather(*crowd)
    assert sorted(entered) == ["127.0.0.1"] * 5 + ["127.0.0.2"]
    assert "127.0.0.2" in entered[:3]


async def test_deadline_of_a_request_holds() -> None:
    """Refused at once where it could not begin in time; 504, or the last event of a stream, where it does not end in time."""
    async with rig(SimulatedTarget(SIMULATED, step_seconds=0.02), max_running=1) as (stack, http):

        def ask(seconds: object, **body: Any) -> Coroutine[Any, Any, httpx.Response]:
            body = {"prompt": "go on", "max_tokens": 3000, "ignore_eos": True, **body}
            return http.post(COMPLETIONS, json=body, headers={"x-deadline-seconds": str(seconds)})

        for nonsense in ("soon", "0", "-1", "nan", "inf", "86401"):
            assert error_of(await ask(nonsense), 400)["param"] == "x-deadline-seconds"
        assert (await ask(20, max_tokens=300)).status_code == 200
        error = error_of(await ask(0.5), 504)
        assert error["message"] == "the request had not ended at its x-deadline-seconds"
        await eventually(lambda: stack.num_sessions == (0, 0))
        events = [line.removeprefix("data: ") for line in (await ask(0.5, stream=True)).text.splitlines() if line]
        assert len(events) > 2
        assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
        await eventually(lambda: stack.num_sessions == (0, 0))
        running = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "go on", "max_tokens": 300, "ignore_eos": True}))
        await eventually(lambda: stack.num_sessions == (1, 1))
        refused = await ask(0.4, max_tokens=1)
        assert "s of waiting are ahead, the deadline is in 0." in error_of(refused, 429)["message"]
        assert (await running).status_code == 200


async def test_requests_are_counted_by_route_and_status() -> None:
    """Paths that are not routes share one label, so that nobody can fill the memory with them."""
    async with rig() as (_, http):
        await http.get("/health")
        for number in range(5):
            await http.get(f"/nowhere/{number}")
        text = (await http.get("/metrics")).text
    assert 'treewire_http_requests_total{code="200",path="/health"} 1.0' in text
    assert 'treewire_http_requests_total{code="404",path="other"} 5.0' in text
