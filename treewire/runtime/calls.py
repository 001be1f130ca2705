"""This file is who calls, and on whose behalf: the caller, the request id and the trace, known to all that a call runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import structlog
from pydantic import BaseModel, ConfigDict, Field

TRACEPARENT_KEY = "traceparent"
TRACESTATE_KEY = "tracestate"
_ANONYMOUS = "anonymous"
# https://www.w3.org/TR/trace-context/ version 00: version, trace id, parent id, flags.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


class CallerLimits(BaseModel):
    """What one caller may use at most; None has no limit of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_running: int | None = Field(None, ge=1, description="Generations that run or wait at once.")
    requests_per_minute: int | None = Field(None, ge=1, description="Generations that start within any minute.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens that one generation may ask for.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Tokens of a prompt.")


@dataclass(frozen=True)
class Caller:
    """Somebody who may call; the empty name is everybody without a key of their own."""

    name: str = ""
    limits: CallerLimits = field(default_factory=CallerLimits)


@dataclass(frozen=True)
class Trace:
    """A position in a distributed trace, as W3C trace context writes it."""

    traceparent: str
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None) -> Trace | None:
        """The trace of these headers; None if there is none or it is malformed, as the standard wants."""
        if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
            return None
        return cls(traceparent, tracestate if tracestate and _TRACESTATE.fullmatch(tracestate) else "")

    @property
    def trace_id(self) -> str:
        """The id that all parts of the trace share, 32 hexadecimal digits."""
        return self.traceparent.split("-")[1]

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers that hand the trace on."""
        state = ((TRACESTATE_KEY, self.tracestate),) if self.tracestate else ()
        return ((TRACEPARENT_KEY, self.traceparent), *state)


@dataclass(frozen=True)
class Call:
    """One call that is being answered. `peer` is the host it comes from, `deadline` its end on the monotonic clock."""

    request_id: str = ""
    caller: Caller = field(default_factory=Caller)
    trace: Trace | None = None
    peer: str = ""
    deadline: float | None = None

    @property
    def key(self) -> str:
        """Whose turn it is: the caller's, else everybody's at the peer."""
        return self.caller.name or self.peer or _ANONYMOUS

    @property
    def remaining_seconds(self) -> float | None:
        """What is left until the deadline; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


_current: ContextVar[Call] = ContextVar("call", default=Call())  # noqa: B039 - frozen


def current_call() -> Call:
    """The call that is being answered; an empty one outside of any."""
    return _current.get()


@contextmanager
def answering(call: Call) -> Iterator[None]:
    """While the block runs, and in tasks it starts, this is the current call, and log lines carry its ids."""
    ids = {"request_id": call.request_id}
    if call.trace is not None:
        ids["trace_id"] = call.trace.trace_id
    if call.caller.name:
        ids["caller"] = call.caller.name
    token = _current.set(call)
    try:
        with structlog.contextvars.bound_contextvars(**ids):
            yield
    finally:
        _current.reset(token)
