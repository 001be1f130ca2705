"""The playground in headless Chromium, in front of real servers with simulated engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from tests.browser.driving import PHONE, answer_text, ask, playground, set_option, settled, some_text
from tests.system.local_stack import MODEL, LocalStack
from treewire.events import Round
from treewire.trace import Trace, read_trace
from verify_service.engines.simulated import SimulatedTarget

pytestmark = pytest.mark.browser
QUESTION = "Why is the sky blue?"
SLOW_STEP_SECONDS = 0.05


def slow_target() -> SimulatedTarget:
    """A target whose answer a person can watch growing."""
    return SimulatedTarget(MODEL, step_seconds=SLOW_STEP_SECONDS)


async def rounds_of(stack: LocalStack, max_tokens: int) -> tuple[str, list[Round]]:
    """What the client is told of the same generation: text and rounds."""
    async with stack.client() as client, client.stream(QUESTION, max_tokens=max_tokens, include_rounds=True) as stream:
        rounds = [event async for event in stream if isinstance(event, Round)]
        return stream.text, rounds


async def shown_tokens(page: Page, kind: str) -> list[str]:
    """The texts of the nodes of a kind, in order."""
    labels: list[str] = await page.eval_on_selector_all(f"#tree .node.{kind} .token", "nodes => nodes.map(n => n.textContent)")
    return labels


def as_shown(text: str) -> str:
    """A token as the page writes it: a space at an end is a dot."""
    return f"·{text[1:]}" if text.startswith(" ") else text


async def test_an_answer_streams_in() -> None:
    """The text grows while it is generated, and in the end is the one that any client gets."""
    async with playground(target=slow_target()) as (page, stack):
        await expect(page.locator("#model-text")).to_have_text("under-test")
        await set_option(page, "max-tokens", "60")
        await ask(page, QUESTION)
        await some_text(page)
        early = await answer_text(page)
        assert (await settled(page)).startswith("Done: 60 tokens")
        text = await answer_text(page)
        expected, rounds = await rounds_of(stack, 60)
        assert text == expected
        assert text.startswith(early)
        assert len(early) < len(text)
        assert await page.locator(".turn .text [data-round]").count() == len(rounds)


async def test_every_round_shows_its_tree_and_accepted_path() -> None:
    """The tree of the page is the tree of the round: all nodes, the accepted path and the bonus, round by round."""
    async with playground() as (page, stack):
        await set_option(page, "max-tokens", "40")
        await ask(page, QUESTION)
        await settled(page)
        _, rounds = await rounds_of(stack, 40)
        await page.focus("#timeline")
        await page.keyboard.press("Home")
        for event in rounds:
            accepted = [as_shown(event.node_texts[node]) for node in event.accepted_nodes]
            assert await shown_tokens(page, "accepted") == accepted
            assert await shown_tokens(page, "bonus") == [as_shown(event.bonus_text)]
            assert len(await shown_tokens(page, "rejected")) == len(event.parents) - len(accepted)
            assert await page.locator("#tree .edge.accepted").count() == len(accepted) - 1
            await page.keyboard.press("ArrowRight")
        assert max(len(event.accepted_nodes) for event in rounds) > 1
        assert await page.inner_text("#position") == f"{len(rounds)} of {len(rounds)}"


async def test_no_nodes_of_a_tree_overlap() -> None:
    """Even a wide tree gives every node a place of its own."""
    async with playground() as (page, _):
        await set_option(page, "budget", "96")
        await set_option(page, "max-tokens", "12")
        await ask(page, QUESTION)
        await settled(page)
        await page.click("#previous")
        boxes: list[dict[str, float]] = await page.eval_on_selector_all(
            "#tree .node rect", "rects => rects.map(rect => rect.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) > 90
        for index, one in enumerate(boxes):
            for other in boxes[index + 1 :]:
                beside = one["right"] <= other["left"] or other["right"] <= one["left"]
                assert beside or one["bottom"] <= other["top"] or other["bottom"] <= one["top"]


async def test_a_node_tells_its_probability() -> None:
    """Pointing at a node shows the drafter's probability after the parent and from the root."""
    async with playground() as (page, _):
        await set_option(page, "max-tokens", "30")
        await ask(page, QUESTION)
        await settled(page)
        await page.click("#previous")
        await page.hover("#tree .node.rejected >> nth=0")
        tip = await page.inner_text("#tip")
        assert "rejected" in tip
        assert "% after its parent" in tip
        await page.mouse.move(5, 5)
        await expect(page.locator("#tip")).to_be_hidden()


async def test_the_text_of_a_round_leads_to_its_tree() -> None:
    """A click on a piece of the answer selects the round that gave it."""
    async with playground() as (page, _):
        await set_option(page, "max-tokens", "60")
        await ask(page, QUESTION)
        await settled(page)
        await page.click(".turn .text [data-round='3']")
        assert (await page.inner_text("#position")).startswith("4 of ")
        assert await page.get_attribute(".turn .text .selected", "data-round") == "3"


async def test_the_theme_switches_and_stays() -> None:
    """Dark and light differ, the button says which it is, and the choice outlives a reload."""
    async with playground() as (page, _):
        background = "getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(background)
        await page.click("#theme")
        dark = await page.evaluate(background)
        assert light != dark
        assert await page.get_attribute("#theme", "aria-pressed") == "true"
        await page.reload()
        assert await page.evaluate(background) == dark


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_a_generation_can_be_stopped(way: str) -> None:
    """Stop ends it at the engines too, keeps what came, and the next message works."""
    async with playground(target=slow_target()) as (page, stack):
        await ask(page, QUESTION)
        await some_text(page)
        await (page.click("#stop") if way == "button" else page.keyboard.press("Escape"))
        assert (await settled(page)).startswith("Stopped")
        assert await answer_text(page)
        async with asyncio.timeout(20):
            while stack.num_sessions != (0, 0):
                await asyncio.sleep(0.01)
        await set_option(page, "max-tokens", "3")
        await ask(page, "And now?")
        assert (await settled(page)).startswith("Done: 3 tokens")


async def test_everything_works_from_the_keyboard() -> None:
    """Send, walk the rounds, walk the tree, switch the theme: without a pointer."""

    async def tab_to(selector: str) -> None:
        for _ in range(40):
            if await page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
            await page.keyboard.press("Tab")
        pytest.fail(f"{selector} is not reached with the tab key")

    async with playground() as (page, _):
        await tab_to("#message")
        await page.keyboard.type(QUESTION)
        await page.keyboard.press("Enter")
        await settled(page)
        assert await page.evaluate("document.activeElement.id") == "message"
        await tab_to("#timeline")
        await page.keyboard.press("Home")
        assert await page.get_attribute("#timeline", "aria-valuenow") == "1"
        await page.keyboard.press("ArrowRight")
        assert (await page.get_attribute("#timeline", "aria-valuetext") or "").startswith("round 2 of ")
        await tab_to("#tree .node.root")
        await page.keyboard.press("ArrowRight")
        assert "after its parent" in await page.inner_text("#tip") or "bonus" in await page.inner_text("#tip")
        await tab_to("#theme")
        await page.keyboard.press("Enter")
        assert await page.get_attribute("html", "data-theme") == "dark"


async def test_a_phone_needs_no_sideways_scrolling() -> None:
    """At 360 pixels both panes fit the width, and a button goes from one to the other."""
    async with playground(viewport=PHONE) as (page, _):
        await set_option(page, "max-tokens", "40")
        await ask(page, QUESTION)
        await settled(page)
        for pane, other in (("chat", "rounds"), ("rounds", "chat")):
            await page.click(f"[data-shows={pane}]")
            await expect(page.locator(f"#{pane}")).to_be_visible()
            await expect(page.locator(f"#{other}")).to_be_hidden()
            widths = await page.evaluate(
                "[document.documentElement, document.body, ...document.querySelectorAll('.pane, .conversation')]"
                ".map(box => box.scrollWidth - box.clientWidth)"
            )
            assert max(widths) == 0
        await expect(page.locator("#tree .node.bonus")).to_be_visible()


async def test_plain_decoding_is_measured_beside_it() -> None:
    """The option runs the same request again without drafts, one token a round: equal text, both speeds."""
    async with playground() as (page, stack):
        await set_option(page, "max-tokens", "40")
        await set_option(page, "temperature", "1")
        await page.check("#compare")
        await ask(page, QUESTION)
        await expect(page.locator("#speed .verdict")).to_contain_text("times the speed of plain decoding")
        assert "The text is equal" in await page.inner_text("#speed")
        assert await page.locator("#speed .speed").count() == 2
        assert stack.target.num_sessions == 0


async def test_a_trace_is_saved_and_opened_again(tmp_path: Path) -> None:
    """The saved file is a trace that the program reads, and the page shows it as it showed the generation."""
    async with playground() as (page, _):
        await set_option(page, "max-tokens", "40")
        await ask(page, QUESTION)
        await settled(page)
        shown = await page.inner_text("#measures"), await page.text_content(".turn .text"), await page.inner_text("#stages")
        async with page.expect_download() as download:
            await page.click("#save")
        path = tmp_path / "saved.jsonl"
        await (await download.value).save_as(path)
        trace = read(path)
        assert trace.text == shown[1]
        await page.click("#clear")
        await expect(page.locator("#picture")).to_be_hidden()
        await page.set_input_files("#file", path)
        await expect(page.locator("#picture")).to_be_visible()
        assert (await page.inner_text("#measures"), await page.text_content(".turn .text")) == shown[:2]
        await page.select_option("#pace", "1 a second")
        await page.click("#play")
        await expect(page.locator("#play")).to_have_text("Pause")
        await expect(page.locator("#position")).to_contain_text("2 of")
        assert await page.locator(".turn .text .later").count() > 0
        await page.click("#play")
        assert await page.locator(".turn .text .later").count() == 0


def read(path: Path) -> Trace:
    """The trace of a file."""
    with path.open(encoding="utf-8") as lines:
        return read_trace(lines)


async def test_a_dropped_file_that_is_no_trace_says_why() -> None:
    """The line and the reason are told; the page goes on working."""
    async with playground() as (page, _):
        for content, reason in (("{", "Line 1"), ('{"event":"trace","version":9}', "version is 9, this page knows 1")):
            await drop(page, content)
            assert reason in await page.inner_text("#trace-error")
        await set_option(page, "max-tokens", "5")
        await ask(page, QUESTION)
        assert (await settled(page)).startswith("Done")


async def drop(page: Page, content: str) -> None:
    """Drop a file with this content on the page."""
    await page.evaluate(
        """content => {
            const data = new DataTransfer();
            data.items.add(new File([content], "dropped.jsonl"));
            document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: data }));
        }""",
        content,
    )
    await expect(page.locator("#trace-error")).to_be_visible()


async def test_a_long_trace_draws_one_tree(tmp_path: Path) -> None:
    """Of 600 rounds only the selected one has a tree on the page; any other is a key away."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in long_trace(600)))
    async with playground() as (page, _):
        await page.set_input_files("#file", path)
        await expect(page.locator("#picture")).to_be_visible()
        await page.focus("#timeline")
        await page.keyboard.press("End")
        assert await page.inner_text("#position") == "600 of 600"
        await page.keyboard.press("PageDown")
        assert await page.inner_text("#position") == "590 of 600"
        assert await page.locator("#tree svg").count() == 1
        assert await page.locator("svg .node").count() == 4


def long_trace(num_rounds: int) -> list[dict[str, Any]]:
    """The lines of a trace with that many rounds of three nodes."""
    lines: list[dict[str, Any]] = [
        {"event": "trace", "version": 1, "recorded_at": "2026-01-01T00:00:00+00:00", "request": {"text": "go on"}},
        {"event": "started", "at_seconds": 0, "request_id": "r", "model": "m", "prompt_tokens": 2, "seed": "1"},
        {"event": "chunk", "at_seconds": 0, "text": "a", "token_ids": [1]},
    ]
    for number in range(num_rounds):
        lines.append({"event": "chunk", "at_seconds": number, "text": "bc", "token_ids": [2, 3]})
        tree = {"token_ids": [1, 2, 4], "parents": [-1, 0, 0], "scores": [0.0, -0.5, -1.5], "node_texts": ["a", "b", "d"]}
        answer = {"accepted_nodes": [0, 1], "committed_token_ids": [2, 3], "length": 3 + 2 * number, "bonus_text": "c"}
        times = {"stage_seconds": {"draft": 0.001, "tree_build": 0.0001, "verify": 0.002}}
        lines.append({"event": "round", "at_seconds": number, **tree, **answer, **times})
    return lines


async def test_a_lost_target_is_told_with_a_way_on() -> None:
    """What came stays, the reason stands under it, and the same message can be tried again."""
    async with playground(target=slow_target(), verify_timeout_seconds=5, failover_seconds=1) as (page, stack):
        await ask(page, QUESTION)
        await some_text(page)
        await stack.verify_running.stop()
        assert (await settled(page)).startswith("Failed")
        await expect(page.locator(".turn .notice.bad")).to_be_visible()
        await expect(page.locator(".turn .notice.bad button")).to_have_text("Try again")
        assert await answer_text(page)
