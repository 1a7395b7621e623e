"""What passes between a caller and a Worker, on real sockets; the Worker is a double."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn
from aiohttp import web
from litestar.types import Receive, Scope, Send

from edge.server import Server
from edge.workers.front import Front
from edge.workers.rest import Rest
from edge.workers.table import Entry, Table, write_table

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _edge(scope: Scope, receive: Receive, send: Send) -> None:
    """What is for no Worker."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"the edge", "more_body": False})


@asynccontextmanager
async def passing(
    folder: Path, handler: Handler, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "w.sock")).start()
    entry = Entry(
        name="w", tenant="t", version="1", socket=str(folder / "w.sock"),
        used=str(folder / "used"), token="d", answer_s=10.0, concurrency=2,
    )  # fmt: skip
    write_table(folder / "table.json", [msgspec.structs.replace(entry, **settings)])
    front = Front(_edge, "ams", Table(folder / "table.json", "localhost"))
    server = Server(uvicorn.Config(front, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
        ) as client:
            yield client
    finally:
        server.should_exit = True
        await serving
        await front.close()
        await runner.cleanup()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p")


async def _mirror(request: web.Request) -> web.Response:
    body = await request.read()
    page = {
        "method": request.method,
        "path": request.raw_path,
        "host": request.headers["host"],
        "scheme": request.headers["x-skerry-scheme"],
        "headers": sorted(name.lower() for name in request.headers),
        "body": len(body),
    }
    return web.json_response(page)


async def test_a_request_passes_as_it_is(folder: Path) -> None:
    async with passing(folder, _mirror) as client:
        page = (await client.get("/w/w/a%2Fb/%C3%A9?x=%20&y", headers={"host": "me:1"})).json()
        assert (page["method"], page["path"], page["host"]) == (
            "GET",
            "/a%2Fb/%C3%A9?x=%20&y",
            "me:1",
        )
        assert "content-length" not in page["headers"]
        forged = {
            "x-skerry-worker": "t", "x-skerry-scheme": "s", "connection": "close, x-hop"
        }  # fmt: skip
        page = (await client.put("/w/w/", content=b"x" * 10, headers=forged)).json()
        assert (page["method"], page["path"], page["body"]) == ("PUT", "/", 10)
        ours = {n for n in page["headers"] if n.startswith("x-skerry")}
        assert ours == {"x-skerry-cf", "x-skerry-scheme"}
        assert page["scheme"] == "http"
        assert "cf-connecting-ip" in page["headers"]
        large = await client.post("/w/w/", content=b"x" * 3_000_000)
        assert large.json()["body"] == 3_000_000

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"y" * 100_000

        chunked = await client.post("/w/w/", content=pieces())
        assert chunked.json()["body"] == 300_000
        assert (await client.get("/")).text == "the edge"
        assert (await client.get("/", headers={"host": "w.localhost:1"})).json()["path"] == "/"
        assert (await client.get("/w/x/")).status_code == 404
        own = await client.get("/w/x/", headers={"host": "W.localhost"})
        assert own.json()["path"] == "/w/x/", "below a Worker's own host nobody else answers"


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("me_1.example:65535", True), ("[::1]:80", True), ("", False), ("a/b", False),
        ("a?b", False), ("user@me", False), ("a:b", False), ("[", False), ("a\\b", False),
        ("a:999999", False), ("a b", False),
    ],
)  # fmt: skip
async def test_a_host_that_is_none_is_refused(folder: Path, host: str, good: bool) -> None:
    async with passing(folder, _mirror) as client:
        answer = await client.get("/w/w/p?q", headers={"host": host})
        if good:
            assert (answer.json()["host"], answer.json()["path"]) == (host, "/p?q")
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
            assert "Host header" in answer.json()["error"]["message"]


@pytest.mark.parametrize("status", [200, 204, 304, 404])
async def test_answers_with_and_without_bodies(folder: Path, status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        headers = {"etag": "x", "content-encoding": "br", "x-many": "1"}
        answer = web.Response(status=status, body=b"" if status in (204, 304) else b"\x00raw",
                              headers=headers)  # fmt: skip
        answer.headers.add("set-cookie", "a=1")
        answer.headers.add("set-cookie", "b=2")
        return answer

    async with passing(folder, handler) as client:
        for method in ("GET", "HEAD", "DELETE"):
            async with client.stream(method, "/w/w/") as answer:
                raw = b"".join([piece async for piece in answer.aiter_raw()])
            empty = method == "HEAD" or status in (204, 304)
            assert (answer.status_code, raw) == (status, b"" if empty else b"\x00raw")
            assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
            assert answer.headers["x-skerry-worker-version"] == "w/1"


async def test_pieces_come_as_they_are_made_and_a_caller_that_leaves_is_told(
    folder: Path,
) -> None:
    left, go = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"one")
        try:
            await go.wait()
            await answer.write(b"two")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise
        return answer

    async with passing(folder, handler) as client:
        async with client.stream("GET", "/w/w/") as answer:
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"one"
            go.set()
            assert await anext(pieces) == b"two"
        async with asyncio.timeout(30):
            await left.wait()


async def test_a_caller_that_leaves_early_is_told_too(folder: Path) -> None:
    left, asked = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise
        raise AssertionError

    async with passing(folder, handler) as client:
        asking = asyncio.create_task(client.post("/w/w/", content=b"x"))
        await asked.wait()
        asking.cancel()
        async with asyncio.timeout(30):
            await left.wait()
        assert asking.cancelled()


async def test_headers_of_an_answer_may_be_as_long_as_cloudflares(folder: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        many, size = (int(one) for one in request.query_string.split(","))
        return web.Response(text="well", headers=[("x-a", "a" * size)] * many)

    async with passing(folder, handler) as client:
        for given in ("1,100000", "3000,20", "12,9000"):
            answer = await client.get(f"/w/w/?{given}")
            assert (answer.status_code, answer.text) == (200, "well")
        for given in ("1,140000", "4200,1", "20,9000"):
            refused = await client.get(f"/w/w/?{given}")
            assert (refused.status_code, "128 KiB" in refused.text) == (500, True)


async def test_one_that_has_no_name_for_callers_is_reached_by_its_routes(folder: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=request.path)

    async with passing(folder, handler, by_name=False, routes=("shop.org/*",)) as client:
        assert (await client.get("/w/w/a")).status_code == 404
        assert (await client.get("/a", headers={"host": "w.localhost"})).text != "/a"
        assert (await client.get("/a", headers={"host": "shop.org"})).text == "/a"


async def test_what_goes_wrong_is_named(folder: Path) -> None:
    gate = asyncio.Event()
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/threw":
            headers = {"x-skerry-worker-threw": "m"}
            return web.json_response({"name": "E", "message": "private"}, headers=headers)
        if request.path == "/ends":
            assert request.transport is not None
            request.transport.abort()
        asked.append(request.path)
        await gate.wait()
        return web.Response(text="late")

    async with passing(folder, handler, answer_s=1.0) as client:
        threw = await client.get("/w/w/threw")
        assert threw.status_code == 500
        assert "'w' threw an exception" in threw.text
        assert "private" not in threw.text
        ends = await client.get("/w/w/ends")
        assert (ends.status_code, ends.json()["error"]["code"]) == (500, "worker_failed")
        late = await client.get("/w/w/late")
        assert late.status_code == 504
        assert "did not answer within 1 s" in late.text
    async with passing(folder, handler, open=True) as client:
        assert "threw E: private" in (await client.get("/w/w/threw")).text
        asked.clear()
        running = [asyncio.create_task(client.get("/w/w/late")) for _ in range(2)]
        async with asyncio.timeout(30):
            while len(asked) < 2:
                await asyncio.sleep(0.01)
        refused = await client.get("/w/w/late")
        assert refused.status_code == 429
        assert "has 2 requests under way" in refused.text
        assert refused.headers["retry-after"] == "1"
        gate.set()
        assert [(await one).text for one in running] == ["late", "late"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("fetch returned a dict, not a Response; return Response.from_json(…)",
         "'w' returned a dict, not a Response: fetch has to end in `return Response(…)`"),
        ("fetch returned None, not a Response; is a return missing?", "'w' returned None, not a"),
        ("fetch returned a secret: 1234, not a Response", "'w' threw an exception"),
        ("Incorrect type for Promise: the Promise did not resolve to 'Response'.",
         "'w' returned something that is no Response"),
    ],
)  # fmt: skip
async def test_what_is_no_response_is_said(folder: Path, message: str, told: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        headers = {"x-skerry-worker-threw": "m"}
        return web.json_response({"name": "TypeError", "message": message}, headers=headers)

    async with passing(folder, handler) as client:
        answer = (await client.get("/w/w/")).json()
    assert told in answer["error"]["message"]
    assert "1234" not in answer["error"]["message"]


async def test_who_asks_a_worker_that_rests_is_refused_at_once(folder: Path) -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="well")

    rest = Rest(until=time.time() + 30.0, cause="memory", ends=3)
    async with passing(folder, handler, rest=rest) as client:
        answer = await client.get("/w/w/")
        by_host = await client.get("/", headers={"host": "w.localhost"})
    for one in (answer, by_host):
        assert (one.status_code, one.json()["error"]["code"]) == (503, "worker_resting")
        assert "ended 3 times in a row, the last time since it filled its memory" in one.text
        assert one.headers["retry-after"] == "30"
    assert asked == []
    over = Rest(until=time.time() - 1.0, cause="memory", ends=3)
    async with passing(folder, handler, rest=over) as client:
        assert (await client.get("/w/w/")).text == "well"


async def test_a_host_that_is_started_again_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with passing(folder, _mirror, socket=str(folder / "nobody")) as client:
        asking = asyncio.create_task(client.post("/w/w/", content=b"x" * 10))
        await asyncio.sleep(0.1)
        (folder / "nobody").symlink_to(folder / "w.sock")
        answer = await asking
        assert (answer.status_code, answer.json()["body"]) == (200, 10)
        (folder / "nobody").unlink()
        monkeypatch.setattr("edge.workers.front.ABSENT_S", 0.1)
        fresh = {"connection": "close"}
        async with passing(folder, _mirror, socket=str(folder / "nobody")) as other:
            down = await other.get("/w/w/", headers=fresh)
    assert (down.status_code, down.json()["error"]["code"]) == (500, "worker_failed")
    assert "'w' is not running here" in down.text


async def test_an_answer_that_breaks_off_is_seen_to(folder: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"half")
        await asyncio.sleep(0)
        assert request.transport is not None
        request.transport.abort()
        return answer

    async with passing(folder, handler) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/w/w/")


async def test_pages_on_the_edges_own_origin_are_boxed(folder: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        own = {"content-security-policy": "default-src 'self'"} if request.path == "/own" else {}
        return web.Response(text="<p>", content_type="text/html", headers=own)

    async with passing(folder, handler) as client:
        assert "sandbox" in (await client.get("/w/w/")).headers["content-security-policy"]
        policies = (await client.get("/w/w/own")).headers.get_list("content-security-policy")
        assert len(policies) == 2
        apart = await client.get("/", headers={"host": "w.localhost"})
        assert "content-security-policy" not in apart.headers


async def test_what_acts_on_a_whole_origin_stays_on_a_workers_own(folder: Path) -> None:
    wide = {
        "clear-site-data": '"*"', "service-worker-allowed": "/", "alt-svc": 'h3="elsewhere:443"',
        "strict-transport-security": "max-age=1", "nel": "{}", "report-to": "{}",
        "accept-ch": "dpr", "origin-agent-cluster": "?1",
    }  # fmt: skip
    cookies = {
        "a=1": "a=1",
        "b=2; HttpOnly; Path=/": "b=2; HttpOnly; Path=/w/w/",
        "c=3; path = /cart; Secure": "c=3; Path=/w/w/cart; Secure",
        "d=4; Domain=localhost;PATH=up": "d=4; Path=/w/w/",
        "e=5; Path": "e=5; Path=/w/w/",
        "path=/; domain=x": "path=/",
    }

    async def handler(request: web.Request) -> web.Response:
        answer = web.Response(headers={**wide, "x-kept": "1"})
        for one in cookies:
            answer.headers.add("set-cookie", one)
        return answer

    async with passing(folder, handler) as client:
        shared = (await client.get("/w/w/")).headers
        own = (await client.get("/", headers={"host": "w.localhost"})).headers
    assert not {*wide} & {*shared}
    assert {*wide, "x-kept"} <= {*own}
    assert shared["x-kept"] == "1"
    assert shared.get_list("set-cookie") == list(cookies.values())
    assert own.get_list("set-cookie") == list(cookies)


async def test_a_worker_in_use_is_marked_as_used(folder: Path) -> None:
    used = folder / "used"
    used.touch()
    async with passing(folder, _mirror, touch_s=0.0) as client:
        for _ in range(2):
            os.utime(used, (1, 1))
            await client.get("/w/w/")
            assert used.stat().st_mtime > 1
    async with passing(folder, _mirror, touch_s=1000.0) as client:
        await client.get("/w/w/")
        os.utime(used, (1, 1))
        await client.get("/w/w/")
        assert used.stat().st_mtime == 1, "not with each request"
