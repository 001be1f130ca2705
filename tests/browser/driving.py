"""A page of headless Chromium on the playground of a real stack, whose console stays clean."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import ConsoleMessage, Page, async_playwright, expect

from tests.browser.playground_server import gateway_app, serving
from tests.system.local_stack import LocalStack, local_stack

BROWSER = "chromium"
DESK = {"width": 1440, "height": 900}
PHONE = {"width": 360, "height": 740}
PATIENCE_MILLISECONDS = 20_000
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@asynccontextmanager
async def browser_page(url: str, *, viewport: dict[str, int] | None = None) -> AsyncIterator[Page]:
    """The page at this address. Fails if anything was written to the console as an error or a warning."""
    program = shutil.which(BROWSER)
    assert program, f"these tests drive {BROWSER}, which is not installed: `make chromium` installs it where it can"
    complaints: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=_ARGUMENTS)
        page = await browser.new_page(viewport=viewport or DESK, reduced_motion="reduce")  # type: ignore[arg-type]
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        page.on("console", hear)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"{url}/playground")
        yield page
        await browser.close()
    assert complaints == []


@asynccontextmanager
async def playground(*, viewport: dict[str, int] | None = None, **stack_options: Any) -> AsyncIterator[tuple[Page, LocalStack]]:
    """The page, and the stack behind it."""
    async with (
        local_stack(**stack_options) as stack,
        serving(gateway_app(stack.address)) as url,
        browser_page(url, viewport=viewport) as page,
    ):
        yield page, stack


async def set_option(page: Page, name: str, value: str) -> None:
    """Fill in one of the options; they are opened for it."""
    await page.evaluate("document.querySelector('#options').open = true")
    await page.fill(f"#{name}", value)


async def ask(page: Page, text: str) -> None:
    """Send a message."""
    await page.fill("#message", text)
    await page.click("#send")


async def settled(page: Page) -> str:
    """The status line once nothing is running any more, and the picture shows all that came."""
    await expect(page.locator("#status")).to_have_text(re.compile("^(Done|Stopped|Failed)"), timeout=PATIENCE_MILLISECONDS)
    await page.wait_for_timeout(250)
    return await page.inner_text("#status")


async def some_text(page: Page) -> None:
    """Wait until an answer has a few pieces."""
    await expect(page.locator(".turn .text span").nth(3)).to_be_attached()


async def answer_text(page: Page) -> str:
    """The text of the answer that is shown."""
    text = await page.text_content(".turn.shown .text")
    assert text is not None
    return text
