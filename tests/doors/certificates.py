"""Certificates of an authority that tests make for themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Pair(NamedTuple):
    """A certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority whose files are in a folder; `ca` is its own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._root = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        _openssl(f"req -x509 {_KEY} -days 2 -subj /CN={name} -keyout {self._root.key} -out {self._root.certificate}")

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self._root.certificate

    def issue(self, name: str) -> Pair:
        """A certificate for localhost in that name."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, names = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
        _openssl(f"req {_KEY} -subj /CN={name} -keyout {pair.key} -out {request}")
        _openssl(
            f"x509 -req -in {request} -CA {self._root.certificate} -CAkey {self._root.key} -CAcreateserial "
            f"-days 2 -extfile {names} -out {pair.certificate}"
        )
        return pair


def _openssl(arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], check=True, capture_output=True)
