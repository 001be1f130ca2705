"""This file is where a server listens or is found: host and port, or a socket in the file system."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

_UNIX = "unix:"
_HOST_AND_PORT = re.compile(r"(?:\[(?P<bracketed>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]+)")
_MAX_PORT = 65535


@dataclass(frozen=True)
class Endpoint:
    """A host and a port (0 lets the system choose when listening), or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The endpoint of "host:port", "[::1]:port" or "unix:/path"; ValueError with the text otherwise."""
        if text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if not path:
                raise ValueError(f'"{text}" names no socket: write unix:/path')
            return cls(path=path)
        match = _HOST_AND_PORT.fullmatch(text)
        if match is None:
            raise ValueError(f'"{text}" is not an address: write host:port, [ipv6]:port or unix:/path')
        if match["bracketed"]:
            _check_ipv6(match["bracketed"])
        port = int(match["port"])
        if port > _MAX_PORT:
            raise ValueError(f'"{text}" has port {port}, the largest is {_MAX_PORT}')
        return cls(host=match["bracketed"] or match["host"], port=port)

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach it. A name other than localhost counts as reachable."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _check_ipv6(host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError as error:
        raise ValueError(f'"[{host}]" is not an IPv6 address') from error
