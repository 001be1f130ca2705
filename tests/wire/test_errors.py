"""Errors cross the wire as the rest of the world knows them."""

from __future__ import annotations

import pytest

from treewire import errors
from treewire.errors import STATUS_BY_ERROR, TreewireError, from_rpc_error, to_status
from treewire.v1 import status_pb2


class FakeRpcError(Exception):
    """A failed call with a status, as either gRPC stack raises it."""

    def __init__(self, status: errors.Status) -> None:
        self._status = status

    def code(self) -> object:
        return self._status.code

    def details(self) -> str:
        return self._status.message

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._status.trailing_metadata


@pytest.mark.parametrize("kind", list(STATUS_BY_ERROR))
def test_every_error_survives_the_crossing(kind: type[TreewireError]) -> None:
    """Class, message, metadata, time to retry and request id arrive as they left."""
    sent = kind("value 7, limit 5", metadata={"field": "x"}, retry_after_seconds=1.5, request_id="r-1")
    received = from_rpc_error(FakeRpcError(to_status(sent)))  # type: ignore[arg-type]
    assert type(received) is kind
    assert (received.message, received.metadata, received.retry_after_seconds, received.request_id) == (
        "value 7, limit 5",
        {"field": "x"},
        1.5,
        "r-1",
    )


def test_every_error_has_a_status_of_its_own() -> None:
    """The table is one to one, and complete."""
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TreewireError)}
    assert set(STATUS_BY_ERROR) == classes - {TreewireError}
    assert len(set(STATUS_BY_ERROR.values())) == len(STATUS_BY_ERROR)
    assert len({kind.reason for kind in STATUS_BY_ERROR}) == len(STATUS_BY_ERROR)


def test_details_have_the_wire_format_of_google_rpc() -> None:
    """Field numbers and type URLs are those of google.rpc.Status, ErrorInfo and RetryInfo."""
    fields = {
        name: {field.name: field.number for field in message.fields}
        for name, message in status_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert fields["RichStatus"] == {"code": 1, "message": 2, "details": 3}
    assert fields["ErrorReason"] == {"reason": 1, "domain": 2, "metadata": 3}
    assert fields["RetryAfter"] == {"retry_delay": 1}
    status = to_status(errors.Overloaded("full", retry_after_seconds=2.0))
    rich = status_pb2.RichStatus.FromString(bytes(dict(status.trailing_metadata)["grpc-status-details-bin"]))  # type: ignore[arg-type]
    assert [detail.type_url for detail in rich.details] == [
        "type.googleapis.com/google.rpc.ErrorInfo",
        "type.googleapis.com/google.rpc.RetryInfo",
    ]
    assert rich.code == 8
