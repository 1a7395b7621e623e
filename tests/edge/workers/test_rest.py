"""A Worker that is ended again and again rests, each time longer, and whoever asks is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from core.config_workers import Workers
from core.errors import WorkerResting
from edge.workers.bundle import Bundle
from edge.workers.crons import trigger
from edge.workers.rest import SAID, Conduct, Rest, Rests
from edge.workers.runtime import Launch, Seat
from edge.workers.table import Table
from edge.workers.turning_away import turn_away
from tests.edge.workers.doubles import Words
from tests.edge.workers.test_host import ask, folder, hosting, serve, up
from tests.listeners import Failing

__all__ = ["folder"]


def test_each_end_in_a_row_costs_more_and_good_conduct_is_remembered() -> None:
    conduct = Conduct(Rests())
    assert [conduct.ended() for _ in range(7)] == [0.0, 1.0, 4.0, 16.0, 60.0, 60.0, 60.0]
    conduct.lived(500.0, answered=False)
    assert conduct.ended() == 60.0, "to be left alone is no good conduct"
    conduct.lived(100.0, answered=True)
    assert conduct.ended() == 60.0, "not long enough"
    conduct.lived(100.0, answered=True)
    assert conduct.ended() == 60.0, "an end in between: it counts from there"
    conduct.lived(100.0, answered=True)
    conduct.lived(100.0, answered=True)
    assert [conduct.ended() for _ in range(3)] == [0.0, 1.0, 4.0]


def test_many_ends_are_no_number_too_large() -> None:
    assert Rests().after(100_000) == 60.0
    assert Rests(most_s=0.5).after(2) == 0.5


def test_a_rest_is_over_when_its_time_has_come() -> None:
    rest = Rest(until=100.0, cause="loop", ends=2)
    assert (rest.left_s(99.0), rest.left_s(101.0)) == (1.0, 0.0)


async def refused(table: Table) -> tuple[int, str, str]:
    """Status, Retry-After and message of an answer at the Worker's own socket, where the edge, and
    Workers that are bound to it, come in."""
    entry = table.named("w")
    assert entry is not None
    connector = aiohttp.UnixConnector(entry.socket)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://w/", data=b"x") as answer,
    ):
        body = json.loads(await answer.text())
        return answer.status, answer.headers["retry-after"], body["error"]["message"]


def rest_of(table: Table) -> Rest | None:
    entry = table.named("w")
    assert entry is not None
    return entry.rest


async def end(table: Table) -> None:
    with pytest.raises(aiohttp.ClientError):
        await ask(table, "/loop")


async def test_it_rests_and_all_who_ask_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.workers.unit.Rests", partial(Rests, first_s=60.0))
    limits = Workers(turn_s=0.3, rest_s=60.0)
    async with hosting(folder, limits) as (host, table):
        await serve(host, "one", crons=("* * * * *",))
        await end(table)
        assert await ask(table) == "one -", "once is forgiven"
        await up(host)
        await end(table)
        async with asyncio.timeout(30):
            while (rest := rest_of(table)) is None:
                await asyncio.sleep(0.01)
        assert rest.cause in ("loop", "silent"), "a busy machine keeps it from looping much"
        assert rest.ends == 2
        why = SAID[rest.cause]
        assert 0 < host.row("w").rests_s <= 60.0
        assert host.row("w").rests_for == f"{why}, its end number 2 in a row"
        status, after, message = await refused(table)
        assert (status, 0 < int(after) <= 60) == (503, True)
        assert rest_of(table) == rest, "told at once, not when it is over"
        assert f"'w' rests: it was ended 2 times in a row, the last time since it {why}" in message
        ((unit, cron, book),) = host.crons()
        assert not await trigger(unit, cron.text, 0, book)
        told = [line.message for line in book.last(100) if line.level == "host"]
        assert any("it rests for 60 s" in line for line in told)
        assert any("the timer" in line and "rests" in line for line in told)


async def test_what_is_deployed_begins_anew(folder: Path) -> None:
    async with hosting(folder, Workers(turn_s=0.3)) as (host, table):
        await serve(host, "one")
        await end(table)
        await end(table)
        async with asyncio.timeout(30):
            while not host.row("w").rests_s:
                await asyncio.sleep(0.01)
        await serve(host, "two")
        assert host.row("w").rests_s == 0.0
        assert await ask(table) == "two -"


async def test_no_room_for_a_caller_ends_no_rest(folder: Path) -> None:
    plain = socket.socket(socket.AF_UNIX)
    plain.bind(str(folder / "w.sock"))
    plain.listen()
    with Failing.of(plain, errno.EMFILE, times=1) as listener:
        listener.setblocking(False)
        away = asyncio.create_task(turn_away(listener, 30.0, lambda: WorkerResting("it rests")))
        reader, writer = await asyncio.open_unix_connection(str(folder / "w.sock"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        writer.close()
        away.cancel()
        await asyncio.wait({away})
        assert away.cancelled()


async def test_a_table_that_cannot_be_written_ends_no_worker(folder: Path) -> None:
    async with hosting(folder, Workers(turn_s=0.3, rest_s=0.5)) as (host, table):
        await serve(host, "one")
        await end(table)
        await up(host)
        place = folder / "table.json"
        kept = folder / "kept"
        place.rename(kept)
        place.mkdir()  # in its way: no file takes its place
        await end(table)
        async with asyncio.timeout(30):
            while not host.row("w").rests_for:
                await asyncio.sleep(0.01)
            while host.row("w").rests_for:
                await asyncio.sleep(0.01)
        place.rmdir()
        kept.rename(place)
        async with asyncio.timeout(30):
            assert await ask(table) == "one -"
        assert (host.row("w").rests_s, host.row("w").rests_for) == (0.0, "")
        assert [one.name for one in folder.glob("table.json*")] == ["table.json"]


async def test_a_machine_that_is_full_for_a_moment_ends_no_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(folder, Workers(turn_s=0.3)) as (host, table):
        await serve(host, "one")
        inner, tries = Words.prepare, 0

        async def prepare(self: Words, seat: Seat, bundle: Bundle) -> Launch:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return await inner(self, seat, bundle)

        monkeypatch.setattr(Words, "prepare", prepare)
        pid = host.row("w").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await up(host, wanted=False)
        async with asyncio.timeout(30):
            assert await ask(table) == "one -"
        assert tries == 2
        assert host.row("w").rests_for == "", "no fault of its own"
