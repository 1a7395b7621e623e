"""Places in a trace, and what of the spans a collector gets."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from core.otlp import FLUSH_S, MOST_WAITING
from core.telemetry import (
    SILENT,
    Kind,
    Span,
    TraceContext,
    Value,
    enter,
    open_telemetry,
    read_context,
)
from tests.otlp import collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


def span(number: int, context: TraceContext | None = None) -> Span:
    return Span("step", context or enter(""), 1000.0 + number, 1001.0 + number)


def test_what_is_read_is_what_was_written() -> None:
    context = read_context(HEADER)
    assert context == TraceContext(int(TRACE, 16), int(PARENT, 16), 0, 1)
    assert str(context) == HEADER
    assert read_context(str(enter("").child())) is not None


@pytest.mark.parametrize(
    "header",
    [
        "", "nonsense", HEADER.upper(), f"00-{TRACE}-{PARENT}", f"{HEADER}-more", f" {HEADER}",
        f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"{HEADER}\n", f"00-{TRACE}-{PARENT}-0g",
    ],
)  # fmt: skip
def test_no_such_header_begins_a_trace_of_its_own(header: str) -> None:
    assert read_context(header) is None
    one, other = enter(header), enter(header)
    assert one.sampled
    assert one.parent == 0
    assert one.trace != other.trace


def test_a_version_to_come_is_read_as_far_as_it_is_known() -> None:
    assert read_context(f"01-{TRACE}-{PARENT}-01-more") == read_context(HEADER)


def test_children_are_of_the_same_trace_and_flags() -> None:
    here = enter(f"00-{TRACE}-{PARENT}-03")
    child = here.child()
    assert f"{here.parent:016x}" == PARENT
    assert (child.trace, child.parent, child.flags) == (here.trace, here.span, 3)
    assert child.span not in (here.span, here.child().span)
    assert (here.untold().flags, here.untold().span) == (2, here.span)
    assert not enter(f"00-{TRACE}-{PARENT}-00").child().sampled


def test_who_has_nobody_to_tell_notes_nothing() -> None:
    async def test() -> None:
        async with open_telemetry(None, "edge", "ams") as telemetry:
            assert telemetry is SILENT
            assert not telemetry.on

    asyncio.run(test())


def test_spans_arrive_as_they_were_and_at_the_latest_at_the_end() -> None:
    async def test() -> None:
        here = enter(HEADER)
        noted: dict[str, Value] = {"tokens": 3, "ways": ("a", "b")}
        whole = Span("chat tiny", here, 1000.0, 1002.5, noted, Kind.SERVER, "node_lost")
        unsampled = enter(f"00-{TRACE}-{PARENT}-00")
        with collecting() as got:
            async with open_telemetry(got.url + "/", "edge", "ams") as telemetry:
                assert telemetry.on
                telemetry.tell([whole, span(1, here.child()), span(2, unsampled)])
                assert got.requests == []
            first, second = got.spans
        assert (first.service, first.instance) == ("skerry-edge", "ams")
        assert (first.name, first.kind, first.failed) == ("chat tiny", "SERVER", "node_lost")
        assert (first.trace, first.parent) == (TRACE, PARENT)
        assert (first.began_ns, first.ended_ns) == (1000 * 10**9, 1002.5 * 10**9)
        assert first.attributes == {"tokens": 3, "ways": ["a", "b"]}
        assert (second.parent, second.kind, second.failed) == (first.id, "INTERNAL", "")

    asyncio.run(test())


def test_a_collector_that_does_not_answer_costs_spans_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for it is bounded, telling does not wait, and the end comes soon."""
    monkeypatch.setattr("core.otlp.FLUSH_S", 20.0)

    async def test() -> None:
        with collecting() as got:
            got.open.clear()
            began = time.monotonic()
            async with open_telemetry(got.url, "edge", "ams") as telemetry:
                for number in range(5 * MOST_WAITING):
                    telemetry.tell([span(number)])
                    if not number % 512:
                        await asyncio.sleep(0)
                took_s = time.monotonic() - began
                got.open.set()
            assert took_s < 20.0
            # One batch was on its way when the queue was full.
            assert 0 < len(got.spans) <= MOST_WAITING + 2 * 512
            assert max(one.began_ns for one in got.spans) == (1000 + 5 * MOST_WAITING - 1) * 10**9

    asyncio.run(test())


def test_a_collector_that_is_away_holds_up_no_end_and_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        began = time.monotonic()
        async with open_telemetry("http://me:secret@127.0.0.1:9", "edge", "ams") as telemetry:
            telemetry.tell([span(number) for number in range(MOST_WAITING)])
        assert time.monotonic() - began < FLUSH_S + 20  # the SDK's own limit is 30

    asyncio.run(test())
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "collector away, spans are dropped url=127.0.0.1:9/v1/traces")
    ]


def test_a_collector_that_comes_back_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skerry.telemetry")

    async def test() -> None:
        with collecting() as got:
            got.refuses = True
            async with open_telemetry(got.url, "edge", "ams") as telemetry:
                telemetry.tell([span(number) for number in range(512)])  # goes at once
                async with asyncio.timeout(30):
                    while not caplog.records:
                        await asyncio.sleep(0.01)
                got.refuses = False
                telemetry.tell([span(1)])
            assert len(got.spans) == 1

    asyncio.run(test())
    assert [one.getMessage().split(" url=")[0] for one in caplog.records] == [
        "collector away, spans are dropped", "collector back",
    ]  # fmt: skip
