"""This file is how errors look over HTTP: one table of statuses, one form of body, whatever it was that failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.openai.answers import Error, ErrorBody, to_json
from gateway.openai.mapping import code_of, param_of
from treewire.errors import (
    DeadlineExceeded,
    Incompatible,
    InternalError,
    InvalidRequest,
    Overloaded,
    TreewireError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

JSON = "application/json"
_INVALID_REQUEST = "invalid_request_error"
_SERVER = "server_error"


class _Status(NamedTuple):
    code: int
    type: str


_STATUSES: Mapping[type[TreewireError], _Status] = {
    InvalidRequest: _Status(400, _INVALID_REQUEST),
    Unsupported: _Status(400, _INVALID_REQUEST),
    Unauthenticated: _Status(401, "authentication_error"),
    Overloaded: _Status(429, "rate_limit_error"),
    InternalError: _Status(500, _SERVER),
    Incompatible: _Status(500, _SERVER),
    Unavailable: _Status(503, _SERVER),
    DeadlineExceeded: _Status(504, _SERVER),
}
_HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
}


class UnknownModel(TreewireError):
    """The caller asks for a model that is not served."""

    reason = "MODEL_NOT_FOUND"


def body_of(error: TreewireError) -> Error:
    """The body that tells of an error."""
    kind = _INVALID_REQUEST if isinstance(error, UnknownModel) else _STATUSES[type(error)].type
    return Error(error=ErrorBody(message=error.message, type=kind, param=param_of(error), code=code_of(error)))


def response_to(error: TreewireError) -> Response:
    """The answer to a request that failed."""
    status = 404 if isinstance(error, UnknownModel) else _STATUSES[type(error)].code
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Response(to_json(body_of(error)), status, headers, JSON)


def response_to_http(error: HTTPException) -> Response:
    """The answer to a request that no route takes."""
    code = _HTTP_CODES.get(error.status_code)
    body = Error(error=ErrorBody(message=error.detail, type=_INVALID_REQUEST, param=None, code=code))
    return Response(to_json(body), error.status_code, dict(error.headers or {}), JSON)


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong with a body, and how many more are."""
    problems = error.errors(include_url=False)
    field = _path(problems[0])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    what = problems[0]["msg"]
    if problems[0]["type"] == "extra_forbidden":
        what = "this field is not known"
    message = f"{field}: {what}{more}" if field else f"the body cannot be read: {what}"
    return InvalidRequest(message, metadata={"field": field} if field else {})


def _path(problem: ErrorDetails) -> str:
    """Where it is, as messages[0].content; pydantic's names of alternatives are left out."""
    path = ""
    for before, part in pairwise(("", *problem["loc"])):
        if part == before:  # the alternative is named as its field is
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "function-after"):
            path += f".{part}" if path else part
    return path
