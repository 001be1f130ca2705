"""This file is which release of SGLang the engine is written for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from verify_service.engine import Unsupported

VERSION = "0.5.23"
"""The one release that will do: what is used of SGLang is private and changes between releases."""


def check_version() -> None:
    """Raises Unsupported unless that very release is installed. Imports nothing of it."""
    installed = installed_version()
    if installed != VERSION:
        raise Unsupported(mismatch(installed, ()))


def installed_version() -> str:
    """Raises Unsupported if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise Unsupported(f"the sglang engine needs sglang {VERSION}: pip install 'treewire[sglang]'") from None


def mismatch(installed: str, gaps: Sequence[str]) -> str:
    """A refusal that names both releases and every gap."""
    lacks = f"; it lacks: {'; '.join(gaps)}" if gaps else ""
    return f"the sglang engine is written for sglang {VERSION}, {installed} is installed{lacks}. Install sglang=={VERSION}"
