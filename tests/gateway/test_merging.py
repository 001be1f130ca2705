"""Several streams made one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gateway.merging import merged


class Streams:
    """Streams that tell when they were closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    async def count(self, name: str, number: int, *, fails: bool = False) -> AsyncGenerator[tuple[str, int], None]:
        try:
            for item in range(number):
                await asyncio.sleep(0)
                yield name, item
            if fails:
                raise RuntimeError(name)
        finally:
            self.num_closed += 1


@pytest.mark.parametrize("names", ["a", "abc"])
async def test_all_items_of_all_streams_in_their_own_order(names: str) -> None:
    """Nothing is lost or doubled, each stream keeps its order, and none is waited for by the others."""
    streams = Streams()
    items = [item async for item in merged([streams.count(name, 5 + 20 * place) for place, name in enumerate(names)])]
    for place, name in enumerate(names):
        assert [number for owner, number in items if owner == name] == list(range(5 + 20 * place))
    assert streams.num_closed == len(names)
    if len(names) > 1:
        assert {owner for owner, _ in items[:6]} == set(names)


@pytest.mark.parametrize("names", ["a", "abc"])
async def test_leaving_early_closes_every_stream(names: str) -> None:
    """The end of the merged stream, however it comes, is the end of all."""
    streams = Streams()
    async with aclosing(merged([streams.count(name, 50) for name in names])) as items:
        async for _ in items:
            break
    assert streams.num_closed == len(names)


async def test_a_failure_ends_all() -> None:
    """The first failure is raised, and the other streams are closed."""
    streams = Streams()
    with pytest.raises(RuntimeError, match="b"):
        async for _ in merged([streams.count("a", 1000), streams.count("b", 3, fails=True)]):
            pass
    assert streams.num_closed == 2
