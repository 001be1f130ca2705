"""This file is how one service reaches another: a channel with the options that long, silent streams need."""

from __future__ import annotations

from typing import Any

import grpc

from treewire.errors import REQUEST_ID_KEY
from treewire.runtime.calls import Trace
from treewire.runtime.interceptors import AUTHORIZATION_KEY
from treewire.wire import MAX_MESSAGE_BYTES

Metadata = tuple[tuple[str, str], ...]

KEEPALIVE_SECONDS = 10
_KEEPALIVE_TIMEOUT_SECONDS = 5
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5


def call_metadata(*, token: str | None = None, request_id: str | None = None, trace: Trace | None = None) -> Metadata:
    """The metadata of one call: who calls, on behalf of which request, and as part of which trace."""
    authorization = () if token is None else ((AUTHORIZATION_KEY, f"Bearer {token}"),)
    request = () if not request_id else ((REQUEST_ID_KEY, request_id),)
    return (*authorization, *request, *(() if trace is None else trace.metadata()))


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a client channel, for either gRPC stack. A lost peer is noticed within 15 s, and sought every 5 s at most."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", round(_FIRST_BACKOFF_SECONDS * 1000)),
        ("grpc.max_reconnect_backoff_ms", _LONGEST_BACKOFF_SECONDS * 1000),
        ("grpc.enable_http_proxy", 0),  # services are neighbours
    ]


def open_channel(
    address: str, *, token: str | None = None, tls: grpc.ChannelCredentials | None = None, server_name: str | None = None
) -> grpc.aio.Channel:
    """A channel to `address` (host:port, [ipv6]:port, unix:/path). Every call on it shows `token`.

    With TLS the server's certificate must name `server_name`, if given, instead of the address's host.

    The token goes in clear text unless `tls` is given. Interceptors are not used for it: theirs is a queue before every
    message of a stream.
    """
    options: list[tuple[str, int | str]] = [*channel_options()]
    if tls is not None and server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    channel = (
        grpc.aio.insecure_channel(address, options=options)
        if tls is None
        else grpc.aio.secure_channel(address, tls, options=options)
    )
    return channel if token is None else _AuthorizedChannel(channel, call_metadata(token=token))


class _AuthorizedChannel(grpc.aio.Channel):
    """A channel that adds metadata to every call."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.stream_stream(*args, **kwargs))

    def _authorized(self, multicallable: Any) -> Any:
        def call(*args: Any, metadata: Metadata | None = None, **kwargs: Any) -> Any:
            return multicallable(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return call

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
