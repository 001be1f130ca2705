"""Several answers at the same time, the slowest given up: the asynchronous client."""

import asyncio

from treewire import AsyncClient
from treewire.errors import DeadlineExceeded

PROMPTS = ["Name a tree.", "Name a river.", "Name a star."]


async def answer(client: AsyncClient, prompt: str) -> str:
    try:
        return (await client.generate(prompt, max_tokens=32, deadline_seconds=60)).text
    except DeadlineExceeded:
        return "(took too long)"


async def main() -> None:
    async with AsyncClient() as client:
        for prompt, text in zip(PROMPTS, await asyncio.gather(*(answer(client, each) for each in PROMPTS)), strict=True):
            print(f"{prompt} {text}")


asyncio.run(main())
