"""The page's routes as programs see them."""

from __future__ import annotations

import gzip
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web

from core.config import Edge
from core.keys import new_key
from edge.page.files import read_files
from edge.page.neighbours import Neighbours, address_of
from tests.edge.fakes import SECRET, FakeRegion, RunningEdge, chat, running_edge, world_of

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FAR = {"x-forwarded-for": "203.0.113.7"}
MOST_BYTES = 150_000


async def test_a_browser_gets_the_page_and_a_program_json(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        page = await edge.http.get("/", headers=BROWSER)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
            assert rule in page.headers["content-security-policy"]
        assert "<h1>" in page.text
        assert (await edge.http.get("/")).json()["status"] == "/status"
        assert "accept" in (await edge.http.get("/")).headers["vary"]


async def test_files_are_small_packed_and_kept(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        for name, file in read_files().items():
            answer = await edge.http.get(f"/page/{name}")
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.content == file.plain == gzip.decompress(file.packed)
            again = await edge.http.get(
                f"/page/{name}", headers={"if-none-match": answer.headers["etag"]}
            )
            assert (again.status_code, again.content) == (304, b"")
        raw = await edge.http.get("/page/main.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in raw.headers
        assert (await edge.http.get("/page/../app.py")).status_code == 404
        assert (await edge.http.get("/page/nothing.js")).status_code == 404
    assert sum(len(file.plain) for file in read_files().values()) <= MOST_BYTES


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name, file in read_files().items():
        text = file.plain.decode()
        for start in ("http://", "https://", "//cdn"):
            assert all("www.w3.org" in line for line in text.splitlines() if start in line), (
                f"{name} leads elsewhere"
            )


async def test_what_the_world_page_tells(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        page = (await edge.http.get("/page/world")).json()
        assert (page["near"], page["needs_key"]) == (True, False)
        edges = [(one["name"], one["here"], one["state"]) for one in page["edges"]]
        assert edges == [("here", True, "up"), ("there", False, "unknown")]
        (region,) = page["regions"]
        assert (region["name"], region["state"]) == ("eu", "fresh")
        assert region["status"]["nodes"][0]["name"] == "eu-decode-1"
        assert page["tokens"].keys() == {"all", "reusable", "routed", "delivered"}


async def test_a_request_and_its_story(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        asked = await edge.http.post("/v1/chat/completions", json=chat("hello"))
        name = asked.headers["x-request-id"]
        (row,) = (await edge.http.get("/page/requests")).json()["rows"]
        assert (row["id"], row["region"], row["outcome"]) == (name, "eu", "ok")
        card = (await edge.http.get(f"/page/requests/{name}")).json()
        assert {**card["row"], "at": 0} == {**row, "at": 0}
        assert [step["name"] for step in card["steps"]][:2] == ["admit", "route"]
        assert [one["region"] for one in card["weighed"]] == ["eu"]
        assert "hello" not in str(card)
        unknown = await edge.http.get("/page/requests/nobody")
        assert unknown.status_code == 404


@pytest.mark.parametrize(
    "headers",
    [FAR, {"host": "skerry.example:8787"}, {"host": "127.0.0.1.example"}, {"x-skerry-worker": "t"}],
    ids=["through a proxy", "a name that leads here", "one that looks like loopback", "a Worker"],
)
async def test_from_elsewhere_it_wants_a_key_and_shows_no_requests(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    key, _ = new_key("harbour", now=0)
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu, access='anonymous = "always"')
        async with running_edge(world) as edge:
            assert await _status(edge, "/", {**headers, **BROWSER}) == 200
            assert await _status(edge, "/page/world", headers) == 401
            wrong = {**headers, "authorization": f"Bearer {key}"}
            assert await _status(edge, "/page/world", wrong) == 401
            operator = {**headers, "x-skerry-secret": SECRET}
            for path in ("/page/requests", "/page/requests/x", "/explain"):
                assert await _status(edge, path, headers) == 403
            assert await _status(edge, "/page/requests", operator) == 200
            assert await _status(edge, "/page/world", operator) == 200


async def test_other_edges_are_asked_and_somebody_else_is_not_believed() -> None:
    asked: list[str] = []

    async def status(request: web.Request) -> web.Response:
        asked.append(request.path)
        page = {"edge": "ams", "in_flight": 3, "held": 1, "draining": False, "more": 1,
                "regions": [{"name": "eu", "round_trip_ms": 8.5}]}  # fmt: skip
        return web.json_response(page)

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    edges = [
        Edge(name="ams", listen=address, place="Amsterdam"),
        Edge(name="nyc", listen=address, round_trip_ms={"eu": 84}),
        Edge(name="far", listen="0.0.0.0:8787"),
    ]
    now = 100.0
    async with aiohttp.ClientSession() as session:
        neighbours = Neighbours(edges, session, clock=lambda: now)
        ams, nyc, far = await neighbours.cards()
        assert (ams.state, ams.in_flight, ams.held) == ("up", 3, 1)
        assert ams.round_trip_ms == {"eu": 8.5}
        assert (nyc.state, nyc.in_flight, nyc.round_trip_ms) == ("down", None, {"eu": 84})
        assert (far.state, far.url) == ("unknown", "")
        await neighbours.cards()
        assert len(asked) == 2, "asked again within a second"
        await runner.cleanup()
        now += 2.0
        assert [card.state for card in await neighbours.cards()] == ["down", "down", "unknown"]


def test_where_an_edge_can_be_asked() -> None:
    assert address_of(Edge(name="a", listen="[::1]:8787")) == "http://[::1]:8787"
    assert address_of(Edge(name="a", listen="[::]:8787")) is None
    assert address_of(Edge(name="a", listen="127.0.0.1:0")) is None


async def _status(edge: RunningEdge, path: str, headers: dict[str, str]) -> int:
    answer: httpx.Response = await edge.http.get(path, headers=headers)
    return answer.status_code
