"""This file is TLS: the certificates of a server, read again whenever their files change, and those a caller shows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from treewire.runtime.logging import get_logger

_log = get_logger()


@dataclass(frozen=True)
class Certificates:
    """The files of one server or caller: PEM chain and private key, and the authorities that the other side must be from."""

    certificate_file: Path | None
    key_file: Path | None
    ca_file: Path | None

    def stamps(self) -> tuple[int, ...]:
        """Times of change of the files; OSError if one is missing."""
        return tuple(file.stat().st_mtime_ns for file in (self.certificate_file, self.key_file, self.ca_file) if file)

    @property
    def chain(self) -> bytes | None:
        """The certificate chain."""
        return None if self.certificate_file is None else self.certificate_file.read_bytes()

    @property
    def key(self) -> bytes | None:
        """The private key."""
        return None if self.key_file is None else self.key_file.read_bytes()

    @property
    def ca(self) -> bytes | None:
        """The authorities."""
        return None if self.ca_file is None else self.ca_file.read_bytes()


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """What a caller needs to trust a server, and to be trusted by it if it has a certificate. They are read once."""
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.chain)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """A gRPC server's credentials; each handshake uses the files as they are then. OSError if they cannot be used now."""
    reloading = _Reloading(certificates)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        return _grpc_configuration(certificates) if reloading.has_changed() else None

    return grpc.dynamic_ssl_server_credentials(
        _grpc_configuration(certificates),
        changed,  # type: ignore[arg-type]  # None keeps the last: the stubs do not know
        require_client_authentication=certificates.ca_file is not None,
    )


def _grpc_configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    assert certificates.key is not None, "a server has a key"
    assert certificates.chain is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(certificates.key, certificates.chain)], certificates.ca)


def server_context(certificates: Certificates) -> ssl.SSLContext:
    """An HTTP server's context; each handshake uses the files as they are then. OSError if they cannot be used now."""
    reloading = _Reloading(certificates)
    context = _context(certificates)
    latest = context

    def on_hello(connection: ssl.SSLObject | ssl.SSLSocket, server_name: str | None, first: ssl.SSLContext) -> None:
        nonlocal latest
        if reloading.has_changed():
            latest = _context(certificates)
        connection.context = latest

    context.sni_callback = on_hello
    return context


def _context(certificates: Certificates) -> ssl.SSLContext:
    assert certificates.certificate_file is not None, "a server has a certificate"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificates.certificate_file, certificates.key_file)
    if certificates.ca_file is not None:
        context.load_verify_locations(certificates.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Reloading:
    """Notices that certificates have changed, and that they can be used; a pair that does not fit yet is left alone.

    Raises OSError if they cannot be used at first.
    """

    def __init__(self, certificates: Certificates) -> None:
        _context(certificates)
        self._certificates = certificates
        self._seen = certificates.stamps()

    def has_changed(self) -> bool:
        """True once after each change."""
        try:
            stamps = self._certificates.stamps()
            if stamps == self._seen:
                return False
            _context(self._certificates)
        except (OSError, ssl.SSLError) as error:
            _log.warning("certificates not reloaded, the last ones stay in use", reason=str(error))
            return False
        self._seen = stamps
        _log.info("certificates reloaded")
        return True
