"""A router's one line of a request, and the spans that it tells."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import msgspec
import pytest

from core.telemetry import MOST_ATTEMPTS, SILENT, Kind, read_context
from core.types import GenerateRequest, NodeName, PoolId
from regional.cluster import Charge, Work
from regional.dispatch import Placed, Seat
from regional.pb import node_pb2 as pb
from regional.placement import Placement, Reason
from regional.record import Record
from regional.rpc import NodeSession
from tests.otlp import Ear
from tests.regional.fake_node import FakeNode, attempt_of, work_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

PAIR = (("p1", "prefill"), ("d1", "decode"))
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = f"00-{TRACE}-{ABOVE}-01"


def traced(request: GenerateRequest, trace: str = TRACED) -> GenerateRequest:
    return msgspec.structs.replace(request, trace=trace)


def told(message: pb.RouterMessage) -> str:
    """The traceparent that a node was given."""
    return msgspec.msgpack.decode(work_of(message).request, type=GenerateRequest).trace


async def split(here: Here, prefill: FakeNode, decode: FakeNode) -> list[str]:
    """Play a split request; what its nodes were told of its trace."""
    reserve = await decode.got("reserve")
    attempt = attempt_of(reserve)
    decode.reserved(attempt)
    sent = await prefill.got("prefill")
    await decode.got("start")
    prefill.prefill_done(attempt)
    decode.output(attempt, delta("a"), *ending())
    return [told(reserve), told(sent)]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "skerry.request")
    return caplog


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "skerry.request"]


def test_a_split_request_is_a_child_of_the_edges_attempt(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ear = Ear()
        async with region(tmp_path, *PAIR, telemetry=ear) as here:
            prefill = await here.joined("p1", "prefill")
            decode = await here.joined("d1", "decode")
            answer = here.asking(traced(ask("y" * 200)))
            contexts = await split(here, prefill, decode)
            await answer
        [whole], [attempt] = ear.named("region"), ear.named("attempt")
        assert (f"{whole.context.trace:032x}", f"{whole.context.parent:016x}") == (TRACE, ABOVE)
        assert (whole.kind, whole.failed) == (Kind.SERVER, "")
        assert whole.attributes["gen_ai.usage.output_tokens"] == 2
        assert whole.attributes["skerry.region"] == "here"
        assert contexts == [str(attempt.context)] * 2
        assert attempt.attributes["skerry.reason"] == "split"
        assert attempt.attributes["skerry.prefill"] == "p1"
        assert attempt.attributes["skerry.decode"] == "d1"
        assert attempt.attributes["skerry.tokens.compute"] == 199
        assert {one.name for one in ear.spans} == {"region", "read", "queue", "attempt"}
        for one in ear.spans:
            if one is not whole:
                assert one.context.parent == whole.context.span
                assert whole.start_s <= one.start_s <= one.end_s <= whole.end_s

    run(test())
    [line] = said(lines)
    assert line.startswith("passed id=r1 outcome=ok model=tiny attempts=1 prefill=p1 decode=d1")
    assert "reason=split prompt=200 cached=0 completion=2 read_ms=" in line


def test_a_node_that_is_lost_leaves_an_attempt_that_failed(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ear = Ear()
        async with region(tmp_path, *PAIR, telemetry=ear) as here:
            prefill = await here.joined("p1", "prefill")
            decode = await here.joined("d1", "decode")
            answer = here.asking(traced(ask("y" * 200)))
            lost = attempt_of(await decode.got("reserve"))
            decode.reserved(lost)
            was = told(await prefill.got("prefill"))
            await decode.got("start")
            await prefill.die()
            await decode.got("abort")
            start = await decode.got("start")
            decode.output(attempt_of(start), delta("a"), *ending())
            await answer
        first, second = ear.named("attempt")
        assert (first.failed, second.failed) == ("node_lost", "")
        assert [str(first.context), str(second.context)] == [was, told(start)]
        assert first.context.parent == second.context.parent == ear.named("region")[0].context.span
        assert len(ear.named("queue")) == 2
        assert first.end_s <= second.start_s

    run(test())
    [line] = said(lines)
    assert line.startswith("passed id=r1 outcome=ok model=tiny attempts=2 prefill=- decode=d1")


def test_an_answer_that_is_pushed_out_goes_on_in_another_attempt(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ear = Ear()
        trio = (*PAIR, ("d2", "decode"))
        async with region(tmp_path, *trio, telemetry=ear) as here:
            prefill, first, second = [await here.joined(*one) for one in trio]
            answer = here.asking(traced(ask("y" * 200)))
            reserve = await first.got("reserve")
            first.reserved(attempt_of(reserve))
            await prefill.got("prefill")
            await first.got("start")
            prefill.prefill_done(attempt_of(reserve))
            first.output(attempt_of(reserve), delta("a", 97))
            first.preempted(attempt_of(reserve), b"a", chars_sent=1, computed=200)
            contexts = [told(reserve), *await split(here, prefill, second)]
            await answer
        one, other = ear.named("attempt")
        assert (one.failed, other.failed) == ("", "")
        assert one.attributes["skerry.preempted"]
        assert "skerry.preempted" not in other.attributes
        assert one.end_s <= other.start_s
        assert contexts == [str(one.context), *[str(other.context)] * 2]

    run(test())
    [line] = said(lines)
    assert " outcome=ok model=tiny attempts=2 prefill=p1 decode=d2 " in line


def test_whoever_leaves_leaves_one_line(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        ear = Ear()
        async with region(tmp_path, *PAIR, telemetry=ear) as here:
            decode = await here.joined("d1", "decode")
            async with here.stream(traced(ask("short"))) as stream:
                start = attempt_of(await decode.got("start"))
                decode.output(start, delta("a"))
                await stream.next()
                await stream.next()
            await decode.got("abort")
            await here.until(here.at_rest)
        [attempt] = ear.named("attempt")
        assert attempt.failed == ear.named("region")[0].failed == "cancelled"
        assert 0 <= attempt.attributes["gen_ai.response.time_to_first_chunk"] < 10  # type: ignore[operator]  # it is a number

    run(test())
    [line] = said(lines)
    assert line.startswith("passed id=r1 outcome=cancelled model=tiny attempts=1")


def test_a_deadline_in_the_queue_is_told_as_waiting(
    tmp_path: Path, lines: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        ear = Ear()
        async with region(tmp_path, *PAIR, telemetry=ear) as here:
            decode = await here.joined("d1", "decode")
            running = [
                here.asking(ask("short", request_id=f"full{one}")) for one in range(4)
            ]  # as many as the node takes
            for _ in range(4):
                await decode.got("start")
            await here.events(traced(ask("waits", request_id="late", deadline_s=1.0)))
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await here.until(here.at_rest)
        spans = [one for one in ear.spans if f"{one.context.trace:032x}" == TRACE]
        assert [one.name for one in spans] == ["region", "read", "queue"]
        assert spans[0].failed == "deadline_exceeded"
        assert spans[2].end_s - spans[2].start_s > 0.1

    run(test())
    late = [line for line in said(lines) if "id=late" in line]
    assert [line.split(" reason=")[0] for line in late] == [
        "passed id=late outcome=deadline_exceeded model=tiny attempts=0 prefill=- decode=-"
    ]
    assert len(said(lines)) == 5


@pytest.mark.parametrize("trace", ["", f"00-{TRACE}-{ABOVE}-00"])
def test_who_does_not_come_traced_begins_one_unless_it_is_not_sampled(
    tmp_path: Path, trace: str
) -> None:
    """What a queued request, or an edge of an older release, is; and what an edge may ask for."""

    async def test() -> None:
        ear = Ear()
        async with region(tmp_path, *PAIR, telemetry=ear) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(traced(ask("short"), trace))
            start = await decode.got("start")
            decode.output(attempt_of(start), delta("a"), *ending())
            await answer
        context = read_context(told(start))
        assert context is not None
        assert context.sampled == (not trace)
        assert [one.context.span for one in ear.named("attempt")] == [context.span] * (not trace)
        assert not trace or not ear.spans

    run(test())


def test_where_nobody_collects_nodes_are_told_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR, telemetry=SILENT) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(traced(ask("short")))
            start = await decode.got("start")
            decode.output(attempt_of(start), delta("a"), *ending())
            await answer
        assert told(start) == ""

    run(test())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"nonsense", "invalid_request"),
        (msgspec.msgpack.encode(ask(model="no")), "model_not_found"),
    ],
)
def test_refusals_leave_one_line(
    tmp_path: Path, lines: pytest.LogCaptureFixture, body: bytes, code: str
) -> None:
    async def play() -> None:
        async with region(tmp_path, *PAIR) as here, aiohttp.ClientSession() as client:
            url = f"{here.base}/internal/v1/generate"
            async with client.post(url, data=body, headers=here.headers) as answer:
                await answer.read()

    run(play())
    [line] = said(lines)
    assert f" outcome={code}" in line


def test_attempts_without_end_are_not_told_without_end() -> None:
    ear = Ear()
    record = Record(traced(ask()), "here", ear)
    record.was_read(200)
    placement = Placement(None, PoolId(NodeName("d1")), Reason.COMBINED, 200, 0)
    placed = Placed(placement, None, Seat(NodeSession(pb.Join(), 1), 0, Charge(Work(), 1, 1, 1)), 0)
    contexts = []
    for number in range(3 * MOST_ATTEMPTS):
        contexts.append(read_context(record.placed(f"r1.{number}", placed)))
        record.ended("no_capacity")
    record.close("no_capacity", None)
    told_of = {one.context for one in ear.named("attempt") if one.context.sampled}
    assert len(told_of) == MOST_ATTEMPTS - 1
    # Nodes tell of what is sampled: none of their spans may be without its parent.
    kept = {one.span for one in contexts if one is not None and one.sampled}
    assert kept == {one.span for one in told_of}
    assert ear.named("region")[0].attributes["skerry.attempts"] == 3 * MOST_ATTEMPTS
