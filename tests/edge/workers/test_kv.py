"""The store, and the way workerd's bindings speak to it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from edge.workers.kv_http import store_app
from edge.workers.kv_store import KvStore, Pair, Space

ONE, TWO = Space("t", "one"), Space("t", "two")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Known:
    def space_of(self, token: str, binding: str) -> Space | None:
        return Space("t", binding) if token == "good" else None


@asynccontextmanager
async def asking(folder: Path) -> AsyncIterator[tuple[TestClient, Clock, KvStore]]:  # type: ignore[type-arg] # generic in stubs only
    clock = Clock()
    store = KvStore(folder / "kv.sqlite", clock=clock)
    headers = {"x-skerry-worker": "good", "x-skerry-namespace": "one"}
    server = TestServer(store_app(store, Known(), clock=clock))
    async with TestClient(server, headers=headers) as client:
        yield client, clock, store
    store.close()


def test_pairs_expire_and_spaces_are_apart(tmp_path: Path) -> None:
    clock = Clock()
    store = KvStore(tmp_path / "kv.sqlite", clock=clock)
    other = KvStore(tmp_path / "kv.sqlite", clock=clock)
    pair = Pair("k", b"v", '{"m":1}', int(clock.now) + 60)
    store.put(ONE, pair)
    assert other.get(ONE, "k") == pair, "edges of a state folder share it"
    assert store.get(TWO, "k") is None
    assert store.get(Space("other", "one"), "k") is None
    clock.now += 60
    assert store.get(ONE, "k") is None
    assert store.page(ONE).pairs == ()
    assert store.sweep() == 1
    store.close()
    other.close()


def test_pages_go_on_where_they_ended(tmp_path: Path) -> None:
    store = KvStore(tmp_path / "kv.sqlite")
    keys = ["a", "a%", "a_1", "ab", "b", "é", "é1"]
    for key in keys:
        store.put(ONE, Pair(key, b"", None, None))
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page = store.page(ONE, after=after, limit=2)
        seen += [one.key for one in page.pairs]
        after = page.after
    assert seen == keys
    for prefix in ("", "a", "a%", "a_", "é"):
        found = [one.key for one in store.page(ONE, prefix=prefix).pairs]
        assert found == [key for key in keys if key.startswith(prefix)]
    for other in (Space("other", ONE.id), Space(ONE.tenant, "other")):
        assert store.page(other).pairs == (), "another's keys are not even listed"
    store.close()


def test_a_file_that_is_no_store_is_told(tmp_path: Path) -> None:
    path = tmp_path / "kv.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 40)
    with pytest.raises(sqlite3.Error, match="not a database"):
        KvStore(path)


async def test_what_bindings_ask(tmp_path: Path) -> None:
    async with asking(tmp_path) as (client, clock, store):
        key = "/a%2Fb%3F%20%C3%A9?urlencoded=true"
        put = await client.put(f"{key}&expiration_ttl=60", data=b"\x00\xff",
                               headers={"cf-kv-metadata": '{"m":1}'})  # fmt: skip
        assert put.status == 200
        got = await client.get(key)
        assert (await got.read(), got.headers["cf-kv-metadata"]) == (b"\x00\xff", '{"m":1}')
        assert store.get(ONE, "a/b? é") is not None
        listed = await (await client.get("/?key_count_limit=5&prefix=a")).json()
        assert listed["keys"] == [
            {"name": "a/b? é", "expiration": int(clock.now) + 60, "metadata": '{"m":1}'}
        ]
        assert listed["list_complete"] is True
        clock.now += 61
        assert (await client.get(key)).status == 404
        await client.put("/j?urlencoded=true", data=b'{"x": 1}')
        bulk = await client.post("/bulk/get", json={"keys": ["j", "no"], "type": "json"})
        assert await bulk.json() == {"j": {"x": 1}, "no": None}
        more = await client.post("/bulk/get", json={"keys": ["j"], "withMetadata": True})
        assert await more.json() == {"j": {"value": '{"x": 1}', "metadata": None}}
        assert (await client.delete("/j?urlencoded=true")).status == 200
        assert (await client.get("/j?urlencoded=true")).status == 404


async def test_what_bindings_are_refused(tmp_path: Path) -> None:
    async with asking(tmp_path) as (client, _, _):
        long = "k" * 513

        async def refused(answer: aiohttp.ClientResponse) -> tuple[int, str]:
            return answer.status, answer.reason or ""

        put = client.put
        assert await refused(await put("/k?expiration_ttl=59", data=b"")) == (
            400, "Invalid expiration_ttl of 59. Expiration TTL must be at least 60.",
        )  # fmt: skip
        assert (await refused(await put("/k?expiration=5", data=b"")))[0] == 400
        assert (await refused(await put("/k?expiration_ttl=x", data=b"")))[0] == 400
        assert (await refused(await put(f"/{long}", data=b"")))[0] == 414
        big = {"cf-kv-metadata": "x" * 1025}
        assert (await refused(await put("/k", data=b"", headers=big)))[0] == 413
        assert (await refused(await client.get("/?key_count_limit=1001")))[0] == 400
        assert (await refused(await client.get("/?cursor=%21")))[0] == 400
        many = {"keys": [str(n) for n in range(101)]}
        assert (await refused(await client.post("/bulk/get", json=many)))[0] == 400
        assert (await refused(await client.post("/bulk/get", data=b"x")))[0] == 400
        assert (await refused(await client.patch("/k")))[0] == 405
        stranger = await client.get("/k", headers={"x-skerry-worker": "guess"})
        assert stranger.status == 403
