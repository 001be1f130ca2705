"""What the gateway knows of each replica."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest

from gateway.tokenization import Tokenization
from tests.system.local_stack import MODEL, gateway_server, verify_server
from treewire import AsyncClient
from treewire.costs import TargetCosts
from verify_service.engines.simulated import SimulatedTarget


async def test_what_a_replica_costs_is_forgotten_with_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose addresses come and go leaves nothing behind; one that stays is known from one generation to the next."""
    found = ["127.0.0.1"]

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    async def resolved(address: str) -> None:
        found[:] = [address]
        async with asyncio.timeout(20):
            while [each.address.partition(":")[0] for each in verify.all] != found or not verify.num_available:
                await asyncio.sleep(0.01)

    before = set(map(id, _known()))
    async with verify_server(SimulatedTarget(MODEL), "0.0.0.0:0", allow_anonymous=True) as (running, _):
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        monkeypatch.setattr("gateway.replicas._RESOLVE_SECONDS", 0.05)
        name = f"dns:///verify.internal:{running.address.rpartition(':')[2]}"
        async with gateway_server(name, "", Tokenization.simulated()) as gateway, AsyncClient(gateway.address) as client:
            verify = gateway.process.verify
            for number in range(1, 7):
                await resolved(f"127.0.0.{number}")
                await client.generate("grow a tree", max_tokens=3)
            async with asyncio.timeout(20):
                while len(known := [each for each in _known() if id(each) not in before]) > 1:
                    await asyncio.sleep(0.05)
            await client.generate("grow a tree", max_tokens=3)
            assert [each for each in _known() if id(each) not in before] == known != []


def _known() -> list[TargetCosts]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is TargetCosts]
