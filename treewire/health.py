"""This file is the health check of a service as a command: `python -m treewire.health --address HOST:PORT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treewire.runtime.endpoint import Endpoint
from treewire.runtime.tls import Certificates, channel_credentials

_SERVING = "SERVING"
_DEFAULT_TIMEOUT_SECONDS = 5.0


def check(
    address: str,
    service: str = "",
    timeout_seconds: float = _DEFAULT_TIMEOUT_SECONDS,
    certificates: Certificates | None = None,
) -> str:
    """The status of `service` ("" is the process) at `address`: SERVING, NOT_SERVING, SERVICE_UNKNOWN, or the failure.

    Needs no token. TLS is used if `certificates` are given: whom to trust, and what to show to a server that asks.
    """
    options = [("grpc.enable_http_proxy", 0)]
    channel = (
        grpc.insecure_channel(address, options)
        if certificates is None
        else grpc.secure_channel(address, channel_credentials(certificates), options)
    )
    with channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str]) -> int:
    """Print the status; 0 if it is SERVING, 1 if not, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m treewire.health", description="Ask a service for its health.")
    parser.add_argument("--address", required=True, help="host:port, [ipv6]:port or unix:/path")
    parser.add_argument("--service", default="", help="full name of a service; without it, the process")
    parser.add_argument("--timeout", type=float, default=_DEFAULT_TIMEOUT_SECONDS, help="seconds to wait (%(default)s)")
    parser.add_argument("--tls-ca-file", type=Path, help="PEM authorities of the server's certificate; turns TLS on")
    parser.add_argument("--tls-certificate-file", type=Path, help="PEM certificate to show to a server that asks for one")
    parser.add_argument("--tls-key-file", type=Path, help="PEM private key of that certificate")
    arguments = parser.parse_args(argv)
    shown = (arguments.tls_certificate_file, arguments.tls_key_file)
    certificates = Certificates(*shown, arguments.tls_ca_file) if arguments.tls_ca_file else None
    try:
        endpoint = Endpoint.parse(arguments.address)
        status = check(str(endpoint), arguments.service, arguments.timeout, certificates)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(status)
    return 0 if status == _SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
