"""Taking in callers while there is no room for another socket."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import pytest

from core.accepting import PAUSE_S, SPELL_S, Accepting, Spell
from tests.listeners import Failing

NO_ROOM = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM")


def failure(name: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in caplog.records if "no room" in one.message]


def test_a_spell_is_spoken_of_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    spell = Spell("door", clock=lambda: now[0])
    for _ in range(200):
        now[0] += PAUSE_S
        assert spell.pause_s(failure("EMFILE")) == PAUSE_S
    (line,) = said(caplog)
    assert "at=door" in line
    assert os.strerror(errno.EMFILE) in line
    now[0] += SPELL_S + 1
    spell.pause_s(failure("ENOMEM"))
    assert len(said(caplog)) == 2


@pytest.mark.parametrize("name", ["ECONNABORTED", "EPROTO", "ENETUNREACH"])
def test_who_has_gone_again_costs_no_pause_and_no_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Spell("door").pause_s(failure(name)) == 0.0
    assert said(caplog) == []


@pytest.mark.parametrize("name", ["EBADF", "EINVAL", "ENOTSOCK"])
def test_what_listens_no_more_is_not_asked_again(name: str) -> None:
    with pytest.raises(OSError, match=os.strerror(getattr(errno, name))):
        Spell("door").pause_s(failure(name))


@pytest.mark.parametrize("name", NO_ROOM)
def test_without_room_it_pauses_and_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        listener = Failing.on_loopback(getattr(errno, name), times=3)
        came: list[socket.socket] = []
        accepting = Accepting(listener, came.append, of="door")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with socket.create_connection(listener.getsockname()):
            await until(lambda: bool(came))
            assert loop.time() - began >= 3 * PAUSE_S * 0.9, "it did not spin"
            assert len(said(caplog)) == 1
            came[0].close()
        accepting.close()

    asyncio.run(go())


def test_who_has_gone_holds_up_nobody() -> None:
    async def go() -> None:
        listener = Failing.on_loopback(errno.ECONNABORTED, times=2)
        came: list[socket.socket] = []
        accepting = Accepting(listener, came.append, of="door")
        with socket.create_connection(listener.getsockname()):
            accepting.take_in()  # at once, past those who have gone
            assert len(came) == 1
            came[0].close()
        accepting.close()

    asyncio.run(go())


def test_closed_while_it_pauses_it_stays_closed() -> None:
    async def go() -> None:
        listener = Failing.on_loopback(errno.EMFILE, times=1000)
        number = listener.fileno()
        accepting = Accepting(listener, lambda _: None, of="door")
        accepting.take_in()
        accepting.take_in()
        accepting.close()
        accepting.close()
        with socket.create_server(("127.0.0.1", 0)) as next_one:
            assert next_one.fileno() == number, "descriptors are used again"
            await asyncio.sleep(PAUSE_S * 1.5)
            loop = asyncio.get_running_loop()
            assert not loop.remove_reader(number), "nobody listens for us there"
        assert listener.failed == 2

    asyncio.run(go())


def test_what_cannot_be_helped_is_not_tried_for_ever() -> None:
    async def go() -> None:
        listener = Failing.on_loopback(errno.EINVAL, times=1000)
        faults: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        accepting = Accepting(listener, lambda _: None, of="door")
        with socket.create_connection(listener.getsockname()):
            await until(lambda: bool(faults))
            await asyncio.sleep(PAUSE_S * 2)
        assert (listener.failed, len(faults)) == (1, 1)
        accepting.close()

    asyncio.run(go())
