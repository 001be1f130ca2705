"""This file is the errors of treewire: one class for each decision a caller can take, and their one table of statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from treewire.v1 import status_pb2

DOMAIN = "treewire"
REQUEST_ID_KEY = "x-request-id"
_DETAILS_KEY = "grpc-status-details-bin"
_ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"
_RETRY_INFO_URL = "type.googleapis.com/google.rpc.RetryInfo"


class TreewireError(Exception):
    """Anything that went wrong. `message` states the value and the limit; `reason` is the decision in UPPER_SNAKE_CASE.

    `retry_after_seconds` is set where another try makes sense, `request_id` where the server named one.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds
        self.request_id = request_id


class InvalidRequest(TreewireError):
    """The request can never succeed as it is: mend it."""

    reason = "INVALID_REQUEST"


class Unsupported(TreewireError):
    """The choice exists in the contract but not in this server or engine: choose another."""

    reason = "UNSUPPORTED"


class Overloaded(TreewireError):
    """The server is full: try again after `retry_after_seconds`."""

    reason = "OVERLOADED"


class DeadlineExceeded(TreewireError):
    """The caller's deadline passed before the end."""

    reason = "DEADLINE_EXCEEDED"


class Unavailable(TreewireError):
    """The server cannot be reached, is starting or is draining: try another, or later."""

    reason = "UNAVAILABLE"


class Unauthenticated(TreewireError):
    """The token is missing or wrong."""

    reason = "UNAUTHENTICATED"


class Incompatible(TreewireError):
    """Two parties do not fit together: version, model, vocabulary, or order of messages."""

    reason = "INCOMPATIBLE"


class InternalError(TreewireError):
    """A fault of the server, not of the request."""

    reason = "INTERNAL"


STATUS_BY_ERROR: Mapping[type[TreewireError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Incompatible: grpc.StatusCode.FAILED_PRECONDITION,
    InternalError: grpc.StatusCode.INTERNAL,
}
_ERROR_BY_STATUS = {
    **{status: error for error, status in STATUS_BY_ERROR.items()},
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.CANCELLED: Unavailable,  # cancelled by the server: our own cancellation never becomes an error
    grpc.StatusCode.ABORTED: Unavailable,
}


class Status(NamedTuple):
    """An error as gRPC carries it."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def to_status(error: TreewireError) -> Status:
    """The status that tells a client of `error`: code, message, and ErrorInfo (and RetryInfo) as rich details."""
    code = STATUS_BY_ERROR[type(error)]
    rich = status_pb2.RichStatus(code=code.value[0], message=error.message)
    info = status_pb2.ErrorReason(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    rich.details.append(AnyMessage(type_url=_ERROR_INFO_URL, value=info.SerializeToString()))
    if error.retry_after_seconds is not None:
        retry = status_pb2.RetryAfter()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        rich.details.append(AnyMessage(type_url=_RETRY_INFO_URL, value=retry.SerializeToString()))
    trailing: list[tuple[str, str | bytes]] = [(_DETAILS_KEY, rich.SerializeToString())]
    if error.request_id:
        trailing.append((REQUEST_ID_KEY, error.request_id))
    return Status(code, error.message, tuple(trailing))


def from_rpc_error(error: grpc.RpcError) -> TreewireError:
    """The error behind a failed call, on either the synchronous or the asyncio stack."""
    code, message = error.code(), error.details()
    trailing = dict(cast("Iterable[tuple[str, Any]]", error.trailing_metadata() or ()))
    metadata: dict[str, str] = {}
    retry_after_seconds = None
    for detail in _details(trailing.get(_DETAILS_KEY)):
        if detail.type_url == _ERROR_INFO_URL:
            metadata = dict(status_pb2.ErrorReason.FromString(detail.value).metadata)
        elif detail.type_url == _RETRY_INFO_URL:
            retry_after_seconds = status_pb2.RetryAfter.FromString(detail.value).retry_delay.ToMilliseconds() / 1000
    error_type: type[TreewireError] = _ERROR_BY_STATUS.get(code, InternalError)
    return error_type(
        message or code.name,
        metadata=metadata,
        retry_after_seconds=retry_after_seconds,
        request_id=trailing.get(REQUEST_ID_KEY),
    )


def _details(value: bytes | None) -> tuple[AnyMessage, ...]:
    if value is None:
        return ()
    try:
        return tuple(status_pb2.RichStatus.FromString(value).details)
    except DecodeError:  # a proxy's own details; the code and the message still tell
        return ()
