"""This file is OpenTelemetry behind an option: the spans of a generation, and the trace that is handed on without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from treewire import __version__
from treewire.runtime.calls import TRACEPARENT_KEY, TRACESTATE_KEY, Call, Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_INSTRUMENTATION = "treewire.gateway"


class GenerationTracer(Protocol):
    """The spans of one generation."""

    @property
    def trace(self) -> Trace | None:
        """The position in the trace that the services called for this generation are told."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A span below the generation's, for as long as the block runs."""

    def note(self, num_prompt_tokens: int, num_output_tokens: int, finish_reason: str) -> None:
        """What came of the generation."""


class Tracing(Protocol):
    """Where spans go."""

    @contextmanager
    def generation(self, call: Call, model: str) -> Iterator[GenerationTracer]:
        """The tracer of one generation, whose own span lasts as long as the block."""

    def close(self) -> None:
        """Send what is left."""


class PassingOn:
    """Makes no spans: hands the caller's trace on as it came."""

    @contextmanager
    def generation(self, call: Call, model: str) -> Iterator[GenerationTracer]:
        """See Tracing."""
        yield _Untraced(call.trace)

    def close(self) -> None:
        """See Tracing."""


class _Untraced:
    def __init__(self, trace: Trace | None) -> None:
        self.trace = trace

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield

    def note(self, num_prompt_tokens: int, num_output_tokens: int, finish_reason: str) -> None:
        """There is no span to note it on."""


class OpenTelemetryTracing:
    """Makes spans and gives them to `exporter`; a generation's span continues the caller's trace."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({SERVICE_NAME: _INSTRUMENTATION, SERVICE_VERSION: __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_INSTRUMENTATION, __version__)

    @contextmanager
    def generation(self, call: Call, model: str) -> Iterator[GenerationTracer]:
        """See Tracing."""
        from opentelemetry.propagate import extract

        attributes = {
            "gen_ai.request.model": model,
            "gen_ai.operation.name": "generate",
            "treewire.request_id": call.request_id,
        }
        span = self._tracer.start_span(
            "generation", context=extract(dict(call.trace.metadata()) if call.trace else {}), attributes=attributes
        )
        with _ending(span):
            yield _Traced(self, span)

    def close(self) -> None:
        """See Tracing."""
        self._provider.shutdown()

    @contextmanager
    def child(self, parent: Span, name: str) -> Iterator[None]:
        """A span below `parent`."""
        from opentelemetry.trace import set_span_in_context

        with _ending(self._tracer.start_span(name, context=set_span_in_context(parent))):
            yield


class _Traced:
    """Names its parent in every call: a context variable would not follow an async generator from task to task."""

    def __init__(self, tracing: OpenTelemetryTracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def trace(self) -> Trace | None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(self._span))
        return Trace.parse(carrier.get(TRACEPARENT_KEY), carrier.get(TRACESTATE_KEY))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self._tracing.child(self._span, name):
            yield

    def note(self, num_prompt_tokens: int, num_output_tokens: int, finish_reason: str) -> None:
        self._span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", num_output_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    """End the span with the block, with the error that the block ends with; no text of users is in it."""
    from opentelemetry.trace import Status, StatusCode

    try:
        yield
    except Exception as error:
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()


def open_tracing(endpoint: str) -> Tracing:
    """Spans to the OTLP collector at `endpoint` (http://host:port, gRPC); an empty one makes none.

    ImportError with the extra's name if OpenTelemetry is not installed.
    """
    if not endpoint:
        return PassingOn()
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError("tracing needs OpenTelemetry: pip install 'treewire[tracing]'") from error
    return OpenTelemetryTracing(OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://")))
