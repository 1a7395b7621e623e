"""Clients that leave, cancels, deadlines, a full queue: who is told, and that nothing stays."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from pathlib import Path

import msgspec
import pytest

from core.events import Accepted, Fault
from core.types import GenerateRequest
from tests.regional.fake_node import FakeNode, attempt_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

PAIR = (("p1", "prefill"), ("d1", "decode"))
PROMPTLY_S = 10.0


async def _raw(here: Here, request: GenerateRequest) -> socket.socket:
    """A client that is a bare socket, so that a test decides how it goes."""
    body = msgspec.msgpack.encode(request)
    head = (
        f"POST /internal/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        f"x-skerry-secret: {here.secret.decode()}\r\nx-skerry-wire: 1\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", here.app.http_port))
    client.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + body)
    return client


def _close(client: socket.socket, how: str) -> None:
    if how == "half":
        client.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_client_gone_while_nothing_is_sent(tmp_path: Path, how: str) -> None:
    """B25: during a silent prefill, the hardest moment to notice it."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill = await here.joined("p1", "prefill")
            decode = await here.joined("d1", "decode")
            client = await _raw(here, ask())
            attempt = attempt_of(await decode.got("reserve"))
            decode.reserved(attempt)
            await prefill.got("prefill")
            await decode.got("start")
            left = time.monotonic()
            _close(client, how)
            for node in (prefill, decode):
                abort = (await node.got("abort")).abort
                assert (abort.attempt_id, abort.reason) == (attempt, "client_gone")
            assert time.monotonic() - left < PROMPTLY_S
            assert here.at_rest()
            client.close()

    run(test())


def test_client_gone_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            async with here.stream(ask()) as stream:
                attempt = attempt_of(await decode.got("start"))
                decode.output(attempt, delta("a"))
                await stream.next()
                assert await stream.next() == delta("a")
                stream.answer.close()
            assert (await decode.got("abort")).abort.reason == "client_gone"
            assert here.at_rest()

    run(test())


def test_edges_that_leave_before_they_are_answered_leave_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            head = (
                "GET /internal/v1/status HTTP/1.1\r\nhost: x\r\n"
                f"x-skerry-secret: {here.secret.decode()}\r\nx-skerry-wire: 1\r\n\r\n"
            )
            for _ in range(20):
                client = socket.create_connection(("127.0.0.1", here.app.http_port))
                client.sendall(head.encode())
                _close(client, "reset")
                await asyncio.sleep(0.01)
            assert here.at_rest()

    run(test())
    assert [one for one in caplog.records if one.exc_info] == []


async def _full(here: Here, decode: FakeNode) -> list[str]:
    """All four slots of the decode node taken; gives the attempts."""
    tasks = [here.asking(ask("short", request_id=f"full{n}")) for n in range(4)]
    here.background += tasks
    return [attempt_of(await decode.got("start")) for _ in tasks]


def test_client_gone_while_it_waits(tmp_path: Path) -> None:
    """B25: a ghost in the queue holds up nobody and reaches no node."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            running = await _full(here, decode)
            ghost = await _raw(here, ask("ghost", request_id="ghost"))
            await here.queued(1)
            waiting = here.asking(ask("alive", request_id="alive"))
            await here.queued(2)
            ghost.close()
            await here.queued(1)
            decode.output(running[0], delta("a"), *ending())
            start = (await decode.got("start")).start
            assert bytes(start.work.token_ids) == b"alive"
            decode.output(start.attempt_id, delta("b"), *ending())
            assert (await waiting)[1] == delta("b")
            assert start.queued_s > 0

    run(test())


def test_cancel_ends_the_stream_with_its_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(ask())
            await decode.got("start")
            assert await here.cancel("r1") == 204
            assert (await decode.got("abort")).abort.reason == "client_gone"
            fault = (await answer)[-1]
            assert isinstance(fault, Fault)
            assert fault.code == "cancelled"
            assert await here.cancel("r1") == 204  # idempotent
            assert here.at_rest()

    run(test())


def test_a_request_that_comes_twice_replaces_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            first = here.asking(ask())
            old = attempt_of(await decode.got("start"))
            second = here.asking(ask())
            told = {(m.WhichOneof("body"), attempt_of(m)) for m in await decode.next(2)}
            [new] = {attempt for kind, attempt in told if kind == "start"}
            assert told == {("abort", old), ("start", new)}
            decode.output(new, delta("a"), *ending())
            assert (await second)[1] == delta("a")
            fault = (await first)[-1]
            assert isinstance(fault, Fault)
            assert fault.code == "cancelled"

    run(test())


def test_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(ask(deadline_s=1.0))
            attempt = attempt_of(await decode.got("start"))
            decode.output(attempt, delta("a"))
            assert (await decode.got("abort")).abort.reason == "deadline"
            events = await answer
            assert events[1] == delta("a")
            assert isinstance(events[2], Fault)
            assert events[2].code == "deadline_exceeded"
            assert here.at_rest()

    run(test())


def test_deadline_in_the_queue(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            await _full(here, await here.joined("d1", "decode"))
            [fault] = await here.events(ask(request_id="late", deadline_s=0.1))
            assert isinstance(fault, Fault)
            assert fault.code == "deadline_exceeded"
            assert here.app.router.dispatcher.queued == 0

    run(test())


def test_full_queue_refuses_with_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), queue=2) as here:
            await _full(here, await here.joined("d1", "decode"))
            here.background += [here.asking(ask("w", request_id=f"w{n}")) for n in range(2)]
            await here.queued(2)
            [fault] = await here.events(ask(request_id="over"))
            assert isinstance(fault, Fault)
            assert (fault.code, fault.retryable) == ("no_capacity", True)
            assert fault.retry_after_s is not None
            assert fault.retry_after_s >= 1

    run(test())


def test_priority_then_age(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            running = await _full(here, decode)
            for place, (text, priority) in enumerate([("b", 1), ("c", 1), ("a", 0)], start=1):
                request = ask(text, request_id=text, priority=priority)
                here.background.append(here.asking(request))
                await here.queued(place)
            served = b""
            for attempt in running[:3]:
                decode.output(attempt, delta("x"), *ending())
                served += bytes((await decode.got("start")).start.work.token_ids)
            assert served == b"abc"

    run(test())


def test_prefill_takes_one_long_prompt_at_a_time_and_short_ones_pass(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill = await here.joined("p1", "prefill")
            decode = await here.joined("d1", "decode")
            here.background.append(here.asking(ask("x" * 2000, request_id="long1")))
            first = attempt_of(await decode.got("reserve"))
            decode.reserved(first)
            await prefill.got("prefill")
            await decode.got("start")
            here.background.append(here.asking(ask("y" * 2000, request_id="long2")))
            await here.queued(1)
            here.background.append(here.asking(ask("short", request_id="short")))
            assert (await decode.got("start")).start.attempt_id.startswith("short.")
            assert prefill.unread() == []  # no reservation waits for a busy prefill node
            prefill.prefill_done(first)
            assert attempt_of(await decode.got("reserve")).startswith("long2.")

    run(test())


def test_drain_lets_answers_end_and_refuses_new_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(ask())
            attempt = attempt_of(await decode.got("start"))
            stopping = asyncio.create_task(here.app.router.drain(30.0))
            await here.until(lambda: here.app.router.draining)
            [fault] = await here.events(ask(request_id="new"))
            assert isinstance(fault, Fault)
            assert (fault.code, fault.retryable) == ("draining", True)
            assert not stopping.done()
            decode.output(attempt, delta("a"), *ending())
            assert (await answer)[-1] == ending()[-1]
            await stopping

    run(test())


def test_drain_stops_what_does_not_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(ask())
            await decode.got("start")
            await here.app.router.drain(0.05)
            await decode.got("abort")
            events = await answer
            assert isinstance(events[0], Accepted)
            assert isinstance(events[1], Fault)
            assert events[1].code == "draining"

    run(test())


def test_broken_off_a_drain_ends_at_once_and_callers_are_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(ask())
            await decode.got("start")
            stopping = asyncio.create_task(here.app.router.drain(600.0))
            await here.until(lambda: here.app.router.draining)
            here.app.router.break_off()
            await stopping
            fault = (await answer)[-1]
            assert isinstance(fault, Fault)
            assert fault.code == "draining"

    run(test())
