"""What has the focus keeps it, and a question that nobody answered is not lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from playwright.async_api import Route, expect

from tests.edge.fakes import END, FakeRegion, Hold, delta, running_edge, saying, world_of
from tests.edge.page.test_browser import browsing


async def test_story_of_a_request_that_ends_meanwhile_gives_focus_back(tmp_path: Path) -> None:
    going = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [delta("On "), Hold(going), delta("and on"), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge, browsing() as page:
        await page.goto(edge.url)
        await page.get_by_label("Your question").fill("Go on")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("row", name="running")).to_be_visible()
        row = page.get_by_role("button", name=eu.requests[0].id)
        await row.focus()
        await page.keyboard.press("Enter")
        story = page.get_by_role("dialog", name="Request")
        await expect(story).to_be_visible()
        going.set()
        await expect(page.locator("#rows tr")).not_to_contain_text("running")
        await page.keyboard.press("Escape")
        await expect(story).to_be_hidden()
        await expect(row).to_be_focused()


async def test_sending_by_the_button_keeps_a_place(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=saying("Well"))
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge, browsing() as page:
        await page.goto(edge.url)
        await page.get_by_label("Your question").fill("Hello?")
        send = page.get_by_role("button", name="Send")
        await send.focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("log")).to_contain_text("Well")
        await expect(send).to_be_focused()


async def test_a_refused_question_stays_in_the_box(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge, browsing() as page:
        await page.goto(edge.url)
        question = page.get_by_label("Your question")
        refusal = {"error": {"code": "rate_limited", "message": "too many"}}
        await page.route(
            "**/v1/chat/completions", lambda one: one.fulfill(status=429, json=refusal)
        )
        await question.fill("Who is there?")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("log")).to_contain_text("too many")
        await expect(question).to_have_value("Who is there?")


async def test_its_page_keeps_the_focus(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=saying("Well"))
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge, browsing() as page:
        await page.goto(edge.url)
        await expect(page.get_by_text("edge here")).to_be_visible()
        told = 0

        async def busier(route: Route) -> None:
            nonlocal told
            told += 1
            answer = await route.fetch()
            page_now = await answer.json()
            far = {"name": "far", "place": "", "here": False, "state": "up", "in_flight": told}
            page_now["edges"].append({**far, "url": "http://127.0.0.1:9", "round_trip_ms": {}})
            await route.fulfill(response=answer, json=page_now)

        await page.route("**/page/world", busier)
        link = page.get_by_role("link", name="its page")
        await link.focus()
        then = told
        async with asyncio.timeout(20):
            while told < then + 3:
                await asyncio.sleep(0.1)
        await expect(link).to_be_focused()
        await page.unroute_all(behavior="wait")
        await page.goto("about:blank")
