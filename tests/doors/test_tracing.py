"""Spans of a generation, in the caller's trace, with a position of their own for the services behind."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import gateway.assembly
from tests.doors.eventually import eventually
from tests.system.local_stack import local_stack
from treewire.runtime.calls import Trace
from treewire.runtime.tracing import OpenTelemetryTracing, PassingOn, open_tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of gateways go that are made meanwhile."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(gateway.assembly, "open_tracing", lambda endpoint: OpenTelemetryTracing(exporter))
    return exporter


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


@pytest.mark.parametrize("stream", [False, True])
async def test_generation_is_a_span_with_its_stages_below(exporter: InMemorySpanExporter, stream: bool) -> None:
    """Admission, prefill, and each round's draft, build and verify are below the generation, that below the caller's span."""
    async with local_stack(http_bind="127.0.0.1:0") as stack, httpx.AsyncClient(trust_env=False) as http:
        body = {"prompt": "go on", "max_tokens": 30, "ignore_eos": True, "stream": stream}
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "traced"}
        response = await http.post(f"{stack.http_url}/v1/completions", json=body, headers=headers)
        assert response.status_code == 200
        await eventually(lambda: stack.num_sessions == (0, 0))
    spans = exporter.get_finished_spans()
    (generation,) = [span for span in spans if span.name == "generation"]
    assert generation.context is not None
    assert f"{generation.context.trace_id:032x}" == TRACE_ID
    assert f"{parent_id(generation):016x}" == PARENT_ID
    assert generation.attributes is not None
    assert generation.attributes["treewire.request_id"] == "traced"
    assert generation.attributes["gen_ai.usage.output_tokens"] == 30
    below = [span for span in spans if span is not generation]
    assert {parent_id(span) for span in below} == {generation.context.span_id}
    names = [span.name for span in sorted(below, key=lambda span: span.start_time or 0)]
    assert names[:2] == ["admission", "prefill"]
    rounds = names[2:]
    assert len(rounds) >= 3
    assert rounds == ["draft", "tree_build", "verify"] * (len(rounds) // 3)
    assert all(span.end_time for span in spans)


async def test_failed_generation_is_marked_and_tells_no_text(exporter: InMemorySpanExporter) -> None:
    """The span ends with an error of that kind; prompts are in no attribute."""
    async with local_stack(http_bind="127.0.0.1:0", max_running=1, max_queued=0) as stack:
        async with stack.gateway.admission.place(), httpx.AsyncClient(trust_env=False) as http:
            response = await http.post(f"{stack.http_url}/v1/completions", json={"prompt": "confidential"})
        assert response.status_code == 429
    spans = exporter.get_finished_spans()
    assert {span.status.description for span in spans} == {"Overloaded"}
    assert "confidential" not in str([span.to_json() for span in spans])


def test_without_the_option_the_trace_is_only_handed_on() -> None:
    """No endpoint: no spans and no OpenTelemetry, the caller's position in the trace goes to the services as it is."""
    assert isinstance(open_tracing(""), PassingOn)
    code = "import sys, gateway.assembly; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "traceparent",
    [None, "", "00-abc", f"00-{'0' * 32}-{PARENT_ID}-01", f"00-{TRACE_ID}-{'0' * 16}-01", f"00-{TRACE_ID}-{PARENT_ID}-01\n"],
)
def test_malformed_trace_is_none(traceparent: str | None) -> None:
    """As the standard wants: whoever gets one starts anew."""
    assert Trace.parse(traceparent, None) is None
