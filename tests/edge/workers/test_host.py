"""A host with real processes and sockets: staged, served, ended, started again, kept."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from core.config_tenants import ANONYMOUS
from core.config_workers import Workers
from core.errors import NotFound, WorkerRefused
from edge.workers.bundle import digest_of, pack, version_of
from edge.workers.crons import Timers, trigger
from edge.workers.host import Host
from edge.workers.hosted import Place
from edge.workers.kv_store import Space
from edge.workers.pacer import Pacer
from edge.workers.register import Register
from edge.workers.shelf import Shelf
from edge.workers.table import Table
from tests.edge.workers.doubles import FRIEND, KV, LOOPED, Words, bundle_of

LIMITS = Workers(turn_s=0.5)


@asynccontextmanager
async def hosting(folder: Path, limits: Workers = LIMITS) -> AsyncIterator[tuple[Host, Table]]:
    root, shelf = folder / "r", folder / "shelf"
    root.mkdir(exist_ok=True)
    table = folder / "table.json"
    host = Host(
        place=Place(root=root, edge="127.0.0.1:1", store=root / "store"),
        register=Register(root, table, limits),
        limits=limits,
        shelf=Shelf(shelf),
        runtimes={"javascript": Words()},
        pacer=Pacer(),
    )
    await host.open()
    try:
        yield host, Table(table, "localhost")
    finally:
        await host.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: addresses of Unix sockets are."""
    return tmp_path_factory.mktemp("h")


async def ask(table: Table, path: str = "/", name: str = "w") -> str:
    entry = table.named(name)
    assert entry is not None
    connector = aiohttp.UnixConnector(entry.socket)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://w{path}") as answer,  # a GET would be sent again
    ):
        return await answer.text()


async def serve(
    host: Host, word: str, name: str = "w", tenant: str = "t", **settings: object
) -> str:
    data = pack(bundle_of(word, name, **settings))
    version = await host.stage(name, data, tenant=tenant)
    await host.activate(name, version, "deploy")
    return version


def tenant_of(table: Table) -> str:
    """Whom the edge's processes take it to act for."""
    entry = table.named("w")
    assert entry is not None
    return entry.tenant


async def up(host: Host, *, wanted: bool = True) -> None:
    """Wait until the host says that the process is there, or is not."""
    async with asyncio.timeout(30):
        while (host.row("w").pid is not None) is not wanted:
            await asyncio.sleep(0.01)


async def test_versions_are_served_rolled_back_and_kept(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        one = await serve(host, "one")
        assert await ask(table) == "one -"
        staged = await host.stage("w", pack(bundle_of("two")), tenant="t")
        assert await ask(table) == "one -", "what is staged is not served"
        await host.activate("w", staged, "deploy")
        assert await ask(table) == "two -"
        assert await host.stage_kept("w", None) == one
        await host.activate("w", one, "rollback")
        assert await ask(table) == "one -"
        await host.set_secret("w", "SECRET", "s")
        assert await ask(table) == "one s"
        with pytest.raises(NotFound, match="has no secret 'OTHER'"):
            await host.set_secret("w", "OTHER", None)
    assert Table(folder / "table.json", "localhost").named("w") is not None, "it will be again"
    async with hosting(folder) as (host, table):
        assert await ask(table) == "one s", "what was served is served again"
        card, kept = host.card("w")
        assert [(one.version, one.how) for one in card.deployments][-2:] == [
            (one, "rollback"), (one, "secret"),
        ]  # fmt: skip
        assert sorted(kept) == sorted([one, staged])
        with pytest.raises(NotFound, match="kept are"):
            await host.stage_kept("w", "ffff")
        await host.delete("w")
        assert table.named("w") is None
    async with hosting(folder) as (host, _):
        assert host.rows() == []


async def test_one_that_does_not_come_up_is_not_said_to_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits, or its machine has no time for it."""
    monkeypatch.setattr("edge.workers.process.START_S", 0.5)
    async with hosting(folder) as (host, _):
        with pytest.raises(WorkerRefused, match=r"not up after 0\.5 s, .* of them computing"):
            await host.stage("w", pack(bundle_of("waits")), tenant="t")
        assert host.rows() == []


async def test_what_is_refused_changes_nothing(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one", routes=("w.localhost/a/*",))
        for bundle, name, tenant, why in [
            (bundle_of("broken"), "w", "t", "does not start: .*broken as it is"),
            (bundle_of("refused"), "w", "t", "this word is refused"),
            (bundle_of("two"), "w", "other", "belongs to the tenant 't'"),
            (bundle_of("two"), "x", "t", "the bundle is of 'w', not of 'x'"),
            (bundle_of("two", "x", routes=("w.localhost/a/*",)), "x", "t", "the Worker 'w'"),
            (bundle_of("two", "x", services=(FRIEND,)), "x", "t", "'friend', which is not"),
            (bundle_of("two", "x", language="python"), "x", "t", "no Workers in python"),
            (bundle_of("two", "x", crons=("* *",)), "x", "t", "five fields"),
        ]:
            with pytest.raises(WorkerRefused, match=why):
                await host.stage(name, pack(bundle), tenant=tenant)
        with pytest.raises(WorkerRefused, match="no bundle"):
            await host.stage("w", b"\x00", tenant="t")
        with pytest.raises(NotFound, match="not staged"):
            await host.activate("w", "ffffffffffff", "deploy")
        assert [row.name for row in host.rows()] == ["w"]
        assert await ask(table) == "one -"


async def test_an_activation_can_be_taken_back(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        first = await serve(host, "one")
        second = await serve(host, "two")
        with pytest.raises(NotFound, match="by this deploy"):
            await host.withdraw("w", second, "another")
        await host.withdraw("w", second)
        assert await ask(table) == "one -"
        assert host.row("w").version == first
        third = await serve(host, "alone", "new")
        await host.withdraw("new", third)
        assert [row.name for row in host.rows()] == ["w"]
        with pytest.raises(NotFound):
            await host.withdraw("w", second)


async def test_a_redeploy_that_never_came_is_not_taken_back(folder: Path) -> None:
    """The version that it was about is served already, by an earlier deploy."""
    async with hosting(folder) as (host, table):
        await serve(host, "one")
        data = pack(bundle_of("two"))
        version = await host.stage("w", data, tenant="t")
        await host.activate("w", version, "deploy", "first")
        await host.stage("w", data, tenant="t")
        with pytest.raises(NotFound, match="by this deploy"):
            await host.withdraw("w", version, "second")
        assert await ask(table) == "two -"
        await host.activate("w", version, "deploy", "second")
        await host.withdraw("w", version, "second")
        assert await ask(table) == "two -", "what was served before it is served again"
        assert [one.how for one in host.card("w")[0].deployments][-2:] == ["deploy", "withdraw"]


async def test_a_named_tenant_takes_over_what_acted_for_nobody(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        one = await serve(host, "one", tenant=ANONYMOUS, kv=(KV,))
        await host.set_secret("w", "SECRET", "s")
        assert host.space_of(host._hosted["w"].token, "KV") == Space(ANONYMOUS, "space")
        again = await host.stage("w", pack(bundle_of("one", kv=(KV,))), tenant="t")
        assert tenant_of(table) == ANONYMOUS, "what is staged acts for nobody yet"
        await host.activate("w", again, "deploy")
        assert (again, tenant_of(table)) == (one, "t")
        assert host.space_of(host._hosted["w"].token, "KV") == Space("t", "space")
        assert await ask(table) == "one s", "its secrets stay"
        assert host.card("w")[0].deployments[-1].how == "takeover"
        for other in (ANONYMOUS, "other"):
            with pytest.raises(WorkerRefused, match="belongs to the tenant 't'"):
                await host.stage("w", pack(bundle_of("two")), tenant=other)
    async with hosting(folder) as (host, _):
        assert host.row("w").tenant == "t"


async def test_a_takeover_can_be_taken_back(folder: Path) -> None:
    """Also after a restart, and where what it was bound to has been taken over meanwhile."""
    async with hosting(folder) as (host, _):
        await serve(host, "friend", "friend", tenant=ANONYMOUS)
        await serve(host, "one", tenant=ANONYMOUS, services=(FRIEND,))
        await serve(host, "friend", "friend")
        two = await serve(host, "two", services=(FRIEND,))
    async with hosting(folder) as (host, table):
        one = folder / "shelf" / "w" / f"{host.card('w')[0].deployments[0].version}.bundle"
        one.rename(aside := one.with_suffix(".aside"))
        with pytest.raises(NotFound):
            await host.withdraw("w", two)
        assert (host.row("w").tenant, tenant_of(table)) == ("t", "t"), "nothing went back"
        aside.rename(one)
        await host.withdraw("w", two)
        assert tenant_of(table) == ANONYMOUS
        assert await ask(table) == "one -"
        assert host.row("w").tenant == ANONYMOUS
        await serve(host, "two", services=(FRIEND,))
        await host.activate("w", await host.stage_kept("w", None), "rollback", "id")
        await host.withdraw("w", host.card("w")[0].deployments[-1].version, "id")
        assert host.row("w").tenant == "t", "a rollback took nothing over"


async def test_of_two_takeovers_one_is_made(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one", tenant=ANONYMOUS)
        late = await host.stage("w", pack(bundle_of("late")), tenant="other")
        own = await host.stage("w", pack(bundle_of("own")), tenant=ANONYMOUS)
        await serve(host, "two")
        for version in (late, own):
            with pytest.raises(WorkerRefused, match="belongs to the tenant 't'"):
                await host.activate("w", version, "deploy")
            await host.discard("w", version)
        assert await ask(table) == "two -"


async def test_what_is_in_dev_is_not_taken_over(folder: Path) -> None:
    async with hosting(folder) as (host, _):
        data = pack(bundle_of("one"))
        await host.activate(
            "w", await host.stage("w", data, tenant=ANONYMOUS, open_=True), "deploy"
        )
        with pytest.raises(WorkerRefused, match="belongs to the tenant 'anonymous'"):
            await host.stage("w", data, tenant="t", open_=True)


async def test_a_secret_has_a_name_of_its_own(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one", kv=(KV,), vars=(("COLOUR", '"red"'),), ai="AI")
        for name, what in (("KV", "a KV binding"), ("COLOUR", "a variable"), ("AI", "of AI")):
            with pytest.raises(WorkerRefused, match=f"'{name}' would name two things .*{what}"):
                await host.set_secret("w", name, "s")
        await host.set_secret("w", "SECRET", "s")
        late = bundle_of("two", vars=(("SECRET", '"red"'),))
        with pytest.raises(WorkerRefused, match="secret delete SECRET --name w"):
            await host.stage("w", pack(late), tenant="t")
        assert (await ask(table), list(host.card("w")[0].secrets)) == ("one s", ["SECRET"])
        await serve(host, "two")
        await host.set_secret("w", "COLOUR", "s")
        with pytest.raises(WorkerRefused, match=r"'COLOUR' would name two things .*a variable"):
            await host.stage_kept("w", None)  # it had that variable
        assert await ask(table) == "two s"


async def test_two_secrets_at_once_are_both_kept(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one")
        await asyncio.gather(*(host.set_secret("w", key, "s") for key in ("A", "SECRET", "B")))
        assert sorted(host.card("w")[0].secrets) == ["A", "B", "SECRET"]
        assert await ask(table) == "one s"


async def test_a_process_that_ends_or_loops_is_started_by_the_next_request(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one")
        with pytest.raises(aiohttp.ClientError):
            await ask(table, "/end")
        assert await ask(table) == "one -"
        await up(host)
        with pytest.raises(aiohttp.ClientError):
            await ask(table, "/loop")
        assert await ask(table) == "one -"
        assert host.row("w").starts == 3
        told = [line.message for line in host.book("w").last(100) if line.level == "host"]
        assert any("ended with code 3" in line for line in told)
        assert any(LOOPED.search(line) for line in told)
        said = [line.message for line in host.book("w").last(100) if line.level == "log"]
        assert said == ["asked for /", "asked for /"]
        runs = [line.run for line in host.book("w").last(100) if line.run is not None]
        assert [(run.method, run.url, run.status) for run in runs] == [("GET", "/", 200)] * 2


async def test_who_loops_is_not_taken_for_idle(folder: Path) -> None:
    async with hosting(folder, Workers(turn_s=0.5, idle_s=0.1)) as (host, table):
        await serve(host, "one")
        with pytest.raises(aiohttp.ClientError):
            await ask(table, "/loop")
        await up(host, wanted=False)
        told = [line.message for line in host.book("w").last(100) if line.level == "host"]
        assert LOOPED.search(told[-1])


async def test_a_worker_that_nobody_asks_sleeps(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one")
        entry = table.named("w")
        assert entry is not None
        os.utime(entry.used, (1, 1))  # long ago
        await up(host, wanted=False)
        os.utime(entry.used)
        assert await ask(table) == "one -"
        assert host.row("w").starts == 2


async def test_timers_wake_and_run(folder: Path) -> None:
    async with hosting(folder) as (host, _):
        await serve(host, "one", crons=("30 4 * * *", "* * * * *"))
        timers = Timers(host)
        minute = int(dt.datetime(2026, 11, 30, 4, 30, tzinfo=dt.UTC).timestamp())
        due = timers.due(minute)
        assert [text for _, text, _ in due] == ["30 4 * * *", "* * * * *"]
        assert [text for _, text, _ in timers.due(minute + 60)] == ["* * * * *"]
        unit, text, book = due[0]
        assert await trigger(unit, text, minute, book)
        said = [line.message for line in book.last(100) if line.level == "log"]
        assert any(f'"time": {minute * 1000}' in line and "30 4" in line for line in said)


async def test_namespaces_are_of_a_tenant_and_a_token(folder: Path) -> None:
    async with hosting(folder) as (host, table):
        await serve(host, "one", kv=(KV,))
        assert host.space_of("guess", "KV") is None
        token = host._hosted["w"].token
        assert host.space_of(token, "KV") == Space("t", "space")
        assert host.space_of(token, "@ai") == Space("t", "@ai")
        assert host.space_of(token, "OTHER") is None
        agent = table.of_token(token.encode())
        assert agent is not None
        assert (agent.name, agent.tenant) == ("w", "t")
        assert table.of_token(b"guess") is None
        text = (folder / "table.json").read_text()
        assert token not in text


async def test_a_worker_that_others_are_bound_to_stays(folder: Path) -> None:
    async with hosting(folder) as (host, _):
        await serve(host, "f", "friend")
        await serve(host, "one", services=(FRIEND,))
        with pytest.raises(WorkerRefused, match="bound to by w"):
            await host.delete("friend")
        theirs = pack(bundle_of("two", "x", services=(FRIEND,)))
        with pytest.raises(WorkerRefused, match="'friend', which is not deployed"):
            await host.stage("x", theirs, tenant="other")


async def test_a_damaged_version_is_not_served(folder: Path) -> None:
    version = version_of(digest_of(pack(bundle_of("one"))))
    async with hosting(folder) as (host, _):
        assert await serve(host, "one") == version
    path = folder / "shelf" / "w" / f"{version}.bundle"
    path.write_bytes(pack(bundle_of("two")))
    async with hosting(folder) as (host, table):
        assert table.named("w") is None
        assert msgspec.to_builtins(host.row("w"))["version"] is None
        await serve(host, "one")
        assert await ask(table) == "one -"
