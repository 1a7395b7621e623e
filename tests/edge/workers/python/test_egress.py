"""Where a Worker's `fetch` may go, whatever it calls the place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from edge.workers.python.egress import Egress, Reach, Refused, open_egress


@asynccontextmanager
async def inside() -> AsyncIterator[int]:
    """The port of a service that is for this machine alone."""

    async def secret(request: web.Request) -> web.Response:
        return web.Response(text="inside")

    app = web.Application()
    app.router.add_get("/", secret)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def said(egress: Egress, url: str, reach: Reach) -> str:
    """Raises Refused, OSError, aiohttp.ClientError."""
    asked = URL(url, encoded=True)
    async with egress._outward(asked, reach).get(asked, allow_redirects=False) as answer:
        return await answer.text()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost", "127.1", "2130706433", "0x7f.1",
        "0177.0.0.1", "0",
    ],
)  # fmt: skip
async def test_this_machine_is_not_reached_by_any_name(host: str) -> None:
    async with inside() as port, open_egress() as egress:
        with pytest.raises((Refused, OSError, aiohttp.ClientError)):
            await said(egress, f"http://{host}:{port}/", "public")


async def test_it_is_where_the_topology_lets_it() -> None:
    async with inside() as port, open_egress() as egress:
        assert await said(egress, f"http://localhost:{port}/", "any") == "inside"
        with pytest.raises(Refused, match=r"workers\.fetch is none"):
            await said(egress, f"http://localhost:{port}/", "none")
