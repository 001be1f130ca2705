"""The playground's routes, over HTTP on loopback, in front of a real stack."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from gateway.playground.routes import MAX_BODY_BYTES, is_page
from tests.browser.playground_server import gateway_app, serving
from tests.system.local_stack import MODEL, local_stack
from treewire.trace import read_trace
from verify_service.engines.simulated import SimulatedTarget

CHAT = {"chat": {"messages": [{"role": "user", "content": "go on"}]}, "max_tokens": 20}


def lines_of(body: str) -> list[str]:
    """The data of server-sent events."""
    return [block.removeprefix("data: ") for block in body.split("\n\n") if block]


async def test_the_page_may_load_nothing_from_elsewhere() -> None:
    """Every file comes with a policy that allows the page's own scripts and styles alone, and there is nothing inline."""
    async with serving(gateway_app("127.0.0.1:1")) as url, httpx.AsyncClient(base_url=url, follow_redirects=True) as client:
        page = await client.get("/playground")
        assert page.status_code == 200
        assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert not any(inline in page.text for inline in (" style=", "<style", " onclick=", "<script>", "https://", "http://"))
        for name in (
            "app.js",
            "picture.js",
            "stream.js",
            "style.css",
            "theme.js",
            "timeline.js",
            "trace.js",
            "tree.js",
            "icon.svg",
        ):
            file = await client.get(f"/playground/{name}")
            assert (file.status_code, file.headers["x-content-type-options"]) == (200, "nosniff")


@pytest.mark.parametrize("path", ["/playground", "/playground/", "/playground/app.js"])
def test_the_page_needs_no_key(path: str) -> None:
    """What a browser asks for by itself is open; what tells of the model or runs it is not, nor is any other path."""
    assert is_page(path)
    assert not any(is_page(other) for other in ("/playground/model", "/playground/generate", "/playgrounds", "/v1/models"))


async def test_a_generation_is_a_stream_of_trace_lines() -> None:
    """started, chunks and rounds, finished: the lines of a trace, rounds though nobody asked for them."""
    async with local_stack() as stack, serving(gateway_app(stack.address)) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/playground/generate", json=CHAT)
        model = (await client.get("/playground/model")).json()
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = lines_of(response.text)
    kinds = [json.loads(line)["event"] for line in lines]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert {"chunk", "round"} == set(kinds[1:-1])
    header = {"event": "trace", "version": 1, "recorded_at": "now", "request": CHAT}
    trace = read_trace([json.dumps(header), *lines])
    assert trace.text
    assert [timed.at_seconds for timed in trace.events] == sorted(timed.at_seconds for timed in trace.events)
    assert model["model"] == "under-test"


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b'{"chat":', "application/json", "no GenerateRequest"),
        (b'{"chats": 1}', "application/json", 'no field named "chats"'),
        (b"\xff", "application/json", "no GenerateRequest"),
        (b"[" * 100_000, "application/json", "no GenerateRequest"),
        (b"{}", "application/json", "input is empty"),
        (b'{"text": "a", "budget": 100000}', "application/json", "budget is 100000, from 0 to"),
        (json.dumps(CHAT).encode(), "text/plain", "application/json is taken"),
        (b" " * (MAX_BODY_BYTES + 1), "application/json", "longer than"),
    ],
    ids=["broken", "unknown field", "no text", "nested", "empty", "over the limit", "another type", "too long"],
)
async def test_a_bad_request_is_refused_with_its_reason(body: bytes, content_type: str, reason: str) -> None:
    """Status 400 and what is wrong, before any event."""
    async with local_stack() as stack, serving(gateway_app(stack.address)) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/playground/generate", content=body, headers={"content-type": content_type})
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


async def test_a_browser_that_goes_away_ends_the_generation() -> None:
    """No session is left on the engines."""
    target = SimulatedTarget(MODEL, step_seconds=0.02)
    async with (
        local_stack(target) as stack,
        serving(gateway_app(stack.address)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        async with client.stream("POST", "/playground/generate", json={**CHAT, "max_tokens": 1000}) as response:
            lines = response.aiter_lines()
            for _ in range(8):
                await anext(lines)
            assert stack.num_sessions == (1, 1)
        async with asyncio.timeout(20):
            while stack.num_sessions != (0, 0):
                await asyncio.sleep(0.01)


async def test_a_failure_in_mid_stream_is_the_last_event() -> None:
    """The stream ends with an error event that has reason and message."""
    target = SimulatedTarget(MODEL, step_seconds=0.02)
    async with (
        local_stack(target, failover_seconds=1) as stack,
        serving(gateway_app(stack.address)) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/playground/generate", json={**CHAT, "max_tokens": 1000}) as response,
    ):
        lines = [line async for line in stopping_after(response, 8, stack.verify_running)]
    failure = json.loads(lines[-1].removeprefix("data: "))
    assert failure["event"] == "error"
    assert failure["reason"] in ("UNAVAILABLE", "INTERNAL")  # by where the round was when its target went away
    assert failure["message"]


async def stopping_after(response, num_lines, service):
    """The lines of a response that are not empty; a service is stopped after some."""
    count = 0
    async for line in response.aiter_lines():
        count += 1
        if count == num_lines:
            await service.stop()
        if line:
            yield line
