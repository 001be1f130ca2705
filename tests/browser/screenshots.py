"""This file takes the documentation's pictures of the playground: `python -m tests.browser.screenshots GATEWAY [PROMPT]`.

GATEWAY is the address of a running one, such as `treewire up` prints.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from playwright.async_api import expect

from tests.browser.driving import ask, browser_page, set_option
from tests.browser.playground_server import gateway_app, serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
VIEWPORT = {"width": 1440, "height": 1080}
PROMPT = (
    "Copy this text exactly, without changes: The gateway builds the draft tree, the target checks the draft tree, "
    "and the gateway commits the accepted path."
)
COMPARISON_MILLISECONDS = 300_000


async def take(gateway: str, prompt: str) -> None:
    """Ask once, compare with plain decoding, and take the page in both themes."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    async with serving(gateway_app(gateway)) as url, browser_page(url, viewport=VIEWPORT) as page:
        page.set_default_timeout(COMPARISON_MILLISECONDS)
        await set_option(page, "max-tokens", "56")
        await page.check("#compare")
        await page.evaluate("document.querySelector('#options').open = false")
        await ask(page, prompt)
        await expect(page.locator("#speed .verdict")).to_be_visible(timeout=COMPARISON_MILLISECONDS)
        await page.click(".turn .text [data-round='2']")
        await page.locator("#status").evaluate("status => document.activeElement.blur()")
        await page.mouse.move(2, 2)
        await page.screenshot(path=IMAGES / "playground.png")
        await page.click("#theme")
        await page.mouse.move(2, 2)
        await page.screenshot(path=IMAGES / "playground-dark.png")


if __name__ == "__main__":
    asyncio.run(take(sys.argv[1], *(sys.argv[2:] or [PROMPT])))
