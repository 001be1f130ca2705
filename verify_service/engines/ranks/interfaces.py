"""This file is which network interface the ranks of several machines speak over."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # of linux/sockios.h: an interface's IPv4 address
_NAME_BYTES = 256
_ADDRESS = slice(20, 24)


def interface_towards(address: str) -> str:
    """The interface whose IPv4 address this machine has towards host:port. Raises ValueError if none has it.

    gloo would take the one that the machine's own name resolves to, which need not reach the others.
    """
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                return name
    raise ValueError(f"no network interface has {own}, this machine's address towards {address}")


def _address_of(any_socket: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[: _NAME_BYTES - 1]))
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(answer[_ADDRESS])
