"""treewire: a client of disaggregated speculative decoding with draft trees.

Two clients with one surface (`Client`, `AsyncClient`), what a request may ask for (`Sampling`), what a stream gives
(`events`) and what may go wrong (`errors`). Names are loaded when first used, so that `treewire.core` needs no gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treewire import errors as errors
    from treewire import events as events
    from treewire.client import AsyncClient as AsyncClient
    from treewire.client import Client as Client
    from treewire.types import Sampling as Sampling

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Sampling", "__version__", "errors", "events"]

_MODULES = {"AsyncClient": "treewire.client", "Client": "treewire.client", "Sampling": "treewire.types"}
_SUBMODULES = frozenset({"errors", "events"})


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"treewire.{name}")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'treewire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
