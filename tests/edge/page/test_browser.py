"""The page in a real browser: chat, world, stories, keys; by keyboard, in both colours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, async_playwright, expect

from core.events import Fault
from tests.edge.fakes import END, SECRET, FakeRegion, Hold, delta, running_edge, saying, world_of
from tests.servers import needed

SCREENSHOT = Path(__file__).resolve().parents[3] / "build" / "page.png"
PATIENCE_MS = 20_000
EVIL = "<img src=x onerror='document.title=1'><script>document.title=1</script>"


@asynccontextmanager
async def browsing(**context: object) -> AsyncIterator[Page]:
    """A page of headless Chromium; whatever it complains of is an error here."""
    complaints: list[str] = []
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=needed("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(
            viewport={"width": 1400, "height": 1000},
            **context,  # type: ignore[arg-type]  # options of new_page
        )
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: _refused(said.text, complaints))
        yield page
        await browser.close()
    assert complaints == []


async def _accessible(page: Page) -> None:
    """No violation of what axe checks: names, roles, contrast, order."""
    found = await Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def _refused(said: str, complaints: list[str]) -> None:
    if "Content Security Policy" in said:
        complaints.append(said)


_WATCHED = """() => {
  window.changes = 0;
  window.polls = 0;
  const watcher = new MutationObserver((seen) => { window.changes += seen.length; });
  for (const id of ["rows", "edges", "here"]) {
    const all = {childList: true, subtree: true, characterData: true};
    watcher.observe(document.getElementById(id), all);
  }
  const ask = window.fetch;
  window.fetch = (url, ...more) => {
    if (String(url).includes("/page/requests")) window.polls += 1;
    return ask(url, ...more);
  };
}"""
"""Counts what changes in the page from then on, and how often it has asked for news."""


async def _asked_again(page: Page, url: str) -> None:
    """By somebody else."""
    answer = await page.request.post(
        f"{url}/v1/completions", data={"model": "tiny", "prompt": "And again?"}
    )
    assert answer.ok


async def test_a_question_its_path_and_its_story_by_keyboard(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=saying("It is ", EVIL))
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge, browsing() as page:
        await page.goto(edge.url)
        await expect(page.get_by_text("edge here")).to_be_visible()
        question = page.get_by_label("Your question")
        await expect(question).to_be_focused()
        await page.keyboard.type("What is a skerry?")
        await page.keyboard.press("Enter")
        talk = page.get_by_role("log")
        await expect(talk).to_contain_text(f"It is {EVIL}")
        await expect(talk).to_contain_text("12 prompt, 8 cached")
        assert await page.title() == "Skerry", "an answer was read as HTML"

        asked = eu.requests[0].id
        row = page.get_by_role("button", name=asked)
        await expect(page.get_by_role("row", name=asked)).to_contain_text("here → eu")
        await row.focus()
        await expect(page.locator("#region-eu")).to_have_class("place lit")
        await page.keyboard.press("Enter")
        story = page.get_by_role("dialog", name=f"Request {asked}")
        await expect(story.get_by_role("listitem").first).to_contain_text("admit")
        await expect(story.get_by_role("row", name="eu taken")).to_be_visible()
        await _accessible(page)
        await page.keyboard.press("Escape")
        await expect(story).to_be_hidden()
        await expect(row).to_be_focused()
        await _asked_again(page, edge.url)
        await expect(page.get_by_role("row", name="→ eu")).to_have_count(2)
        await expect(row).to_be_focused()
        await row.evaluate(_WATCHED)
        async with asyncio.timeout(30):
            while await page.evaluate("window.polls") < 3:
                await asyncio.sleep(0.05)
        assert await page.evaluate("window.changes") == 0, "nothing was new"
        await expect(row).to_be_focused()

        await page.get_by_role("button", name="Colours").click()
        light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await page.get_by_role("button", name="Colours").click()
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light != dark
        await _accessible(page)
        await page.get_by_role("tab", name="Worker").click()
        await expect(page.get_by_role("tabpanel")).to_contain_text('env.AI.run("tiny"')
        SCREENSHOT.parent.mkdir(exist_ok=True)
        await page.screenshot(path=SCREENSHOT, full_page=True)


async def test_failures_are_told_where_they_happen(tmp_path: Path) -> None:
    cut = Fault(code="internal_error", message="the node is gone")
    eu = FakeRegion("eu", script=lambda _: [delta("Half an "), cut])
    async with eu.serving(), browsing() as page, running_edge(world_of(tmp_path, eu)) as edge:
        await page.goto(edge.url)
        await page.get_by_label("Your question").fill("Hello?")
        await page.get_by_role("button", name="Send").click()
        talk = page.get_by_role("log")
        await expect(talk).to_contain_text("Half an")
        await expect(talk).to_contain_text("the node is gone")
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.route("**/page/world", lambda route: route.abort())
        await expect(page.get_by_role("alert")).to_contain_text("does not answer")
        await page.unroute("**/page/world")
        await expect(page.get_by_role("alert")).to_be_hidden()
        await page.goto("about:blank")


async def test_stopping_an_answer_frees_it(tmp_path: Path) -> None:
    going = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [delta("On "), Hold(going), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge, browsing() as page:
        await page.goto(edge.url)
        await page.get_by_label("Your question").fill("Go on")
        await page.get_by_role("button", name="Send").click()
        await expect(page.get_by_role("log")).to_contain_text("On")
        await page.get_by_role("button", name="Stop").click()
        await expect(page.get_by_role("log")).to_contain_text("stopped")
        async with asyncio.timeout(30):
            await eu.left[eu.requests[0].id].wait()


async def test_from_elsewhere_it_asks_for_a_key(tmp_path: Path) -> None:
    far = {"x-forwarded-for": "203.0.113.7"}
    async with (
        FakeRegion("eu").serving() as eu,
        running_edge(world_of(tmp_path, eu)) as edge,
        browsing(extra_http_headers=far) as page,
    ):
        await page.goto(edge.url)
        dialog = page.get_by_role("dialog", name="Keys of this tab")
        await expect(dialog).to_contain_text("wants an API key")
        await dialog.get_by_label("Operator's secret").fill(SECRET)
        await dialog.get_by_role("button", name="Use").click()
        await expect(page.get_by_text("edge here")).to_be_visible()
        await expect(page.get_by_text("Nothing has been asked yet.")).to_be_visible()
        question = page.get_by_label("Your question")
        refusal = {"error": {"code": "invalid_api_key", "message": "no key, no answer"}}
        await page.route(
            "**/v1/chat/completions", lambda route: route.fulfill(status=401, json=refusal)
        )
        await question.fill("Who is there?")
        await page.get_by_role("button", name="Send").click()
        await expect(dialog).to_contain_text("no key, no answer")
        await expect(question).to_have_value("Who is there?")
