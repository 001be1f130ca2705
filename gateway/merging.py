"""This file is several streams made one: items of all of them, each as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_Item = TypeVar("_Item")


async def merged(streams: Sequence[AsyncGenerator[_Item, None]]) -> AsyncGenerator[_Item, None]:
    """All items of the streams, in the order in which they come. The first failure ends the others and is raised.

    Leaving early, however, ends all streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    items: asyncio.Queue[_Item] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_forward(stream, items)) for stream in streams]
    try:
        while not (items.empty() and all(task.done() for task in tasks)):
            taking = asyncio.ensure_future(items.get())
            await asyncio.wait([taking, *(task for task in tasks if not task.done())], return_when=asyncio.FIRST_COMPLETED)
            _raise_failure(tasks)
            if taking.done():
                yield taking.result()
            else:
                taking.cancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(stream: AsyncGenerator[_Item, None], items: asyncio.Queue[_Item]) -> None:
    async with aclosing(stream) as opened:
        async for item in opened:
            await items.put(item)


def _raise_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and (failure := task.exception()) is not None:
            raise failure
