"""This file is traces: a generation's events and their times as lines of JSON, as docs/trace.md describes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from google.protobuf import json_format

from treewire.errors import TreewireError
from treewire.events import Chunk, Event, Finished, Round, Started
from treewire.types import Statistics
from treewire.v1 import generate_pb2

TRACE_VERSION = 1
"""Raised whenever a reader of the version before could misread a line."""

_HEADER = "trace"
_ROOT_PARENT = -1


class TraceError(ValueError):
    """A file is no trace that can be read; the message has the line."""


@dataclass(frozen=True)
class Failure:
    """The end of a generation that failed; `reason` is that of `treewire.errors`."""

    reason: str
    message: str
    retry_after_seconds: float | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, error: TreewireError) -> Failure:
        """What a trace says of an error."""
        return cls(error.reason, error.message, error.retry_after_seconds, error.request_id)


TraceEvent: TypeAlias = Event | Failure

_KINDS: Mapping[str, type[TraceEvent]] = {
    "started": Started,
    "chunk": Chunk,
    "round": Round,
    "finished": Finished,
    "error": Failure,
}
_NUMBER = (int, float)
_JSON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("request_id", "model", "text", "finish_reason", "reason", "message", "bonus_text", "seed"), str),
    **dict.fromkeys(("stage_seconds", "statistics"), dict),
    **dict.fromkeys(("prompt_tokens", "output_tokens", "rounds", "lone_roots", "draft_tokens", "accepted_tokens"), int),
    **dict.fromkeys(("length", "certificate_violations"), int),
    **dict.fromkeys(("ttft_seconds", "total_seconds"), _NUMBER),
}
_ELEMENT_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("token_ids", "parents", "accepted_nodes", "committed_token_ids"), int),
    **dict.fromkeys(("acceptance_histogram", "rounds_by_nodes"), int),
    "scores": _NUMBER,
    "node_texts": str,
    "stage_seconds": _NUMBER,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


class TimedEvent(NamedTuple):
    """An event, and the seconds from the request to it."""

    at_seconds: float
    event: TraceEvent


@dataclass(frozen=True)
class Trace:
    """A generation as it was recorded. `recorded_at` is ISO 8601; one that was broken off has no Finished."""

    request: generate_pb2.GenerateRequest
    recorded_at: str
    events: tuple[TimedEvent, ...]

    def all(self, kind: type[Any]) -> list[Any]:
        """The events of a kind, in order."""
        return [event for _, event in self.events if isinstance(event, kind)]

    @property
    def text(self) -> str:
        """The text that was generated."""
        return "".join(chunk.text for chunk in self.all(Chunk))


def header_line(request: generate_pb2.GenerateRequest, recorded_at: str) -> str:
    """The first line of a trace, without its line end."""
    asked = json_format.MessageToDict(request, preserving_proto_field_name=True)
    return _dumps({"event": _HEADER, "version": TRACE_VERSION, "recorded_at": recorded_at, "request": asked})


def event_line(timed: TimedEvent) -> str:
    """The line of an event, without its line end."""
    event = timed.event
    values = {"event": _NAMES[type(event)], "at_seconds": round(timed.at_seconds, 6), **vars(event)}
    if isinstance(event, Started):
        values["seed"] = str(event.seed)  # JSON's numbers are exact to 2**53 in many readers
    return _dumps(values)


def _dumps(values: Mapping[str, object]) -> str:
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    """What json does not know: a mapping, or the statistics."""
    return dict(value) if isinstance(value, Mapping) else vars(value)


def read_trace(lines: Iterable[str]) -> Trace:
    """The trace of these lines. TraceError, with the number of the line, if one is not as docs/trace.md describes."""
    header: Trace | None = None
    events: list[TimedEvent] = []
    for number, line in enumerate(lines, start=1):
        try:
            values = _object(line)
            if header is None:
                header = _header(values)
            else:
                events.append(_timed_event(values))
        except (ValueError, TypeError, KeyError, json_format.ParseError) as error:
            raise TraceError(f"line {number} is no line of a trace: {error}") from error
    if header is None:
        raise TraceError("the file is empty, a trace has at least its header")
    return Trace(header.request, header.recorded_at, tuple(events))


def _object(line: str) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"an object is expected, this is a {type(values).__name__}")
    return values


def _header(values: dict[str, Any]) -> Trace:
    if values.get("event") != _HEADER:
        raise ValueError(f"the first line is the header with event {_HEADER!r}, this has {values.get('event')!r}")
    if values.get("version") != TRACE_VERSION:
        raise ValueError(f"version is {values.get('version')!r}, this reader knows {TRACE_VERSION}")
    request = json_format.ParseDict(values["request"], generate_pb2.GenerateRequest(), ignore_unknown_fields=True)
    return Trace(request, str(values["recorded_at"]), ())


def _timed_event(values: dict[str, Any]) -> TimedEvent:
    kind = _KINDS.get(values.get("event", ""))
    if kind is None:
        raise ValueError(f"event is {values.get('event')!r}, known are {', '.join(_KINDS)}")
    event = _built(kind, values)
    if isinstance(event, Round):
        _check_tree(event)
    return TimedEvent(float(values["at_seconds"]), event)


def _built(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A value of a class from the fields of an object; unknown ones, of a later writer, are left out."""
    given = {field.name: values[field.name] for field in fields(kind) if field.name in values or field.default is MISSING}
    return kind(**{name: _as_field(name, value) for name, value in given.items()})


def _as_field(name: str, value: Any) -> Any:
    """A field's value from its JSON: arrays are tuples, a seed is text, statistics are an object."""
    _check_type(name, value)
    if name == "seed":
        return int(value)
    if name == "statistics":
        return _built(Statistics, value)
    return tuple(value) if isinstance(value, list) else value


def _check_type(name: str, value: Any) -> None:
    optional = name in ("request_id", "stop") and value is None
    expected = _JSON_TYPES.get(name, list if name in _ELEMENT_TYPES else object)
    if not (optional or isinstance(value, expected)):
        raise ValueError(f"{name} is {value!r}")
    elements = value.values() if isinstance(value, dict) else value
    if name in _ELEMENT_TYPES and not all(isinstance(element, _ELEMENT_TYPES[name]) for element in elements):
        raise ValueError(f"{name} is {value!r}")


def _check_tree(event: Round) -> None:
    """ValueError unless the round has one tree, with all that is said of its nodes, and accepted nodes on one path."""
    num_nodes = len(event.token_ids)
    for name in ("parents", "scores", "node_texts"):
        if len(getattr(event, name)) != num_nodes:
            raise ValueError(f"{name} has {len(getattr(event, name))} entries for {num_nodes} nodes")
    for node, parent in enumerate(event.parents):
        if not (0 <= parent < node or (node == 0 and parent == _ROOT_PARENT)):
            raise ValueError(f"node {node} has parent {parent}")
    path = event.accepted_nodes
    if path[:1] != (0,) or any(not 0 < node < num_nodes for node in path[1:]):
        raise ValueError(f"accepted_nodes are {list(path)} of {num_nodes} nodes, they start at the root")
    if any(event.parents[node] != parent for parent, node in pairwise(path)):
        raise ValueError(f"accepted_nodes {list(path)} are no path")
    if not event.committed_token_ids:
        raise ValueError("committed_token_ids is empty, a commit has at least its bonus token")
