"""This file is the OpenAPI document of the HTTP door, made of the same models that check bodies and make answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.openai import answers, bodies
from treewire import __version__

DEADLINE_KEY = "x-deadline-seconds"
"""The header in which a caller says how long a request may take."""
MAX_DEADLINE_SECONDS = 86_400

_REF = "#/components/schemas/{model}"
_JSON = "application/json"
_TEXT = "text/plain"
_EVENTS = "text/event-stream"
_EVENT = {
    "description": "One event of the stream: its data is a chunk, an error, or [DONE].",
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_DEADLINE = (
    f"The header {DEADLINE_KEY} says how many seconds the request may take: one that could not begin in time is refused when "
    "it comes, one that does not end in time is ended."
)
_ALWAYS = {"405": "The path has other methods."}
_WITH_KEY = {"401": "The key is missing or wrong."}
_WITH_BODY = {
    "400": "The body is wrong: `param` says where, if it is a field.",
    "404": "The model is not served.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
}
_GENERATING = {
    "429": "Too much is asked for at once: try again after `Retry-After` seconds.",
    "500": "A fault of the server.",
    "503": "The server is starting, stopping, or without its target.",
    "504": "It took too long.",
}


@dataclass(frozen=True)
class Operation:
    """A route as the document tells of it."""

    path: str
    method: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    needs_key: bool = True
    needs_target: bool = True

    @property
    def errors(self) -> Mapping[str, str]:
        """What may go wrong, by status."""
        body = _WITH_BODY if self.body else {}
        target = {"503": _GENERATING["503"]} if self.needs_target else {}
        return {**_ALWAYS, **(_WITH_KEY if self.needs_key else {}), **body, **target, **(_GENERATING if self.chunk else {})}


OPERATIONS: Sequence[Operation] = (
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a conversation.",
        answers.ChatCompletion,
        bodies.ChatCompletionRequest,
        answers.ChatCompletionChunk,
    ),
    Operation("/v1/completions", "post", "Continue a text.", answers.Completion, bodies.CompletionRequest, answers.Completion),
    Operation("/v1/models", "get", "What is served.", answers.ModelList),
    Operation("/tokenize", "post", "Token ids of a text or a conversation.", answers.Tokenized, bodies.TokenizeRequest),
    Operation("/detokenize", "post", "Text of token ids.", answers.Detokenized, bodies.DetokenizeRequest),
    Operation("/health", "get", "The process is alive.", answers.Alive, needs_key=False, needs_target=False),
    Operation("/ready", "get", "The gateway takes generations.", answers.Alive, needs_key=False),
    Operation("/version", "get", "What runs.", answers.Version, needs_target=False),
    Operation("/metrics", "get", "Counters for Prometheus.", None, needs_target=False),
    Operation("/openapi.json", "get", "This document.", None, needs_target=False),
)


class _Schemas(NamedTuple):
    of: Mapping[type[BaseModel], Mapping[str, Any]]
    components: Mapping[str, Any]


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    schemas = _schemas()
    paths = {each.path: {each.method: _operation(each, schemas.of)} for each in OPERATIONS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "treewire", "version": __version__, "description": "Speculative decoding with draft trees."},
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _schemas() -> _Schemas:
    models = {model for each in OPERATIONS for model in (each.answer, each.chunk) if model is not None} | {answers.Error}
    inputs = {each.body for each in OPERATIONS if each.body is not None}
    wanted = [*((model, "serialization") for model in models), *((model, "validation") for model in inputs)]
    keys, definitions = models_json_schema(wanted, ref_template=_REF)  # type: ignore[arg-type]
    of = {model: schema for (model, _), schema in keys.items() if issubclass(model, BaseModel)}
    return _Schemas(of, definitions["$defs"])


def _operation(operation: Operation, schema_of: Mapping[type[BaseModel], Mapping[str, Any]]) -> dict[str, Any]:
    error = {_JSON: {"schema": schema_of[answers.Error]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_').replace('.', '_')}",
        "responses": {
            "200": {"description": "Done.", "content": _content(operation, schema_of)},
            **{status: {"description": why, "content": error} for status, why in operation.errors.items()},
        },
    }
    if operation.chunk is not None:
        described["description"] = _DEADLINE
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema_of[operation.body]}}}
    if not operation.needs_key:
        described["security"] = []
    return described


def _content(operation: Operation, schema_of: Mapping[type[BaseModel], Mapping[str, Any]]) -> dict[str, Any]:
    if operation.path == "/metrics":
        return {_TEXT: {"schema": {"type": "string"}}}
    if operation.answer is None:
        return {_JSON: {"schema": {"type": "object"}}}
    content: dict[str, Any] = {_JSON: {"schema": schema_of[operation.answer]}}
    if operation.chunk is not None:
        content[_EVENTS] = {"schema": _EVENT}
    return content
