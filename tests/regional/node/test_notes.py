"""A node's one line of each attempt, whatever becomes of it, and the spans below its router's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from core.errors import Draining
from core.telemetry import Kind
from regional.node.notes import aborted
from tests.otlp import Ear
from tests.regional.node.desk import abort, prefill, reserve, start, work
from tests.regional.node.fakes import FakeNode, fake_node
from tests.regional.node.little import LittleRegion
from tests.regional.node.little_parts import direct, pulling
from tests.regional.node.pairs import BLOCK_BYTES, PROMPT
from tests.regional.node.test_pull import in_a_region

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = f"00-{TRACE}-{ABOVE}-01"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "skerry.request")
    return caplog


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "skerry.request"]


def on_one_node(test: Callable[[FakeNode], Awaitable[None]], ear: Ear | None = None) -> None:
    async def go() -> None:
        async with fake_node(telemetry=ear or Ear()) as node:
            await test(node)
            await node.until_empty()

    asyncio.run(go())


def test_a_split_answer_is_told_by_both_nodes(lines: pytest.LogCaptureFixture) -> None:
    reads, writes = Ear(), Ear()

    async def go() -> None:
        async with fake_node(telemetry=reads) as reader, fake_node(telemetry=writes) as writer:
            given = work(PROMPT, trace=TRACED)
            writer.say(reserve("r.1", given))
            reserved = await writer.desk.reserved("r.1")
            reader.say(prefill("r.1", given, reserved.ticket))
            await reader.desk.prefill_done()
            writer.say(start("r.1", queued_s=0.5))
            await writer.desk.ended("r.1")
            await reader.until_empty()

    asyncio.run(go())
    for ear, name, steps in (
        (reads, "prefill", {"compute", "transfer"}),
        (writes, "answer", {"reserve", "receive", "prefill", "decode"}),
    ):
        whole, *below = ear.spans
        assert (whole.name, whole.kind, whole.failed) == (name, Kind.SERVER, "")
        assert (f"{whole.context.trace:032x}", f"{whole.context.parent:016x}") == (TRACE, ABOVE)
        assert {one.name for one in below} == steps
        for one in below:
            assert one.context.parent == whole.context.span
            assert whole.start_s <= one.start_s <= one.end_s <= whole.end_s
        assert whole.attributes["skerry.node"] == "n1"
        assert whole.attributes["skerry.kv_bytes"] == 10 * BLOCK_BYTES
    answer = writes.spans[0].attributes
    assert answer["gen_ai.usage.input_tokens"] == 150
    assert answer["gen_ai.response.finish_reasons"] == ("stop",)
    assert reads.spans[0].attributes["skerry.computed"] == 149
    [prefilled] = [line for line in said(lines) if line.startswith("prefilled")]
    [answered] = [line for line in said(lines) if line.startswith("answered")]
    assert len(said(lines)) == 2
    assert prefilled.startswith(
        f"prefilled id=r attempt=1 outcome=ok model=m prompt=150 cached=0 computed=149"
        f" kv_bytes={10 * BLOCK_BYTES} ms="
    )
    assert answered.startswith(
        "answered id=r attempt=1 outcome=ok model=m stage=decode prompt=150 cached=0 completion="
    )
    assert " queue_ms=500 prefill_ms=" in answered


def test_an_answer_of_one_node_is_read_and_written_there(lines: pytest.LogCaptureFixture) -> None:
    ear = Ear()

    async def play(node: FakeNode) -> None:
        node.say(start("r.1", work(PROMPT, trace=TRACED)))
        await node.desk.ended("r.1")

    on_one_node(play, ear)
    whole, *steps = ear.spans
    assert [one.name for one in steps] == ["prefill", "decode"]
    assert 0 < whole.attributes["gen_ai.response.time_to_first_chunk"] < 10  # type: ignore[operator]  # it is a number
    assert len(said(lines)) == 1


@pytest.mark.parametrize("trace", ["", f"00-{TRACE}-{ABOVE}-00", "nonsense"])
def test_what_is_not_traced_has_its_line_alone(lines: pytest.LogCaptureFixture, trace: str) -> None:
    ear = Ear()

    async def play(node: FakeNode) -> None:
        node.say(start("r.1", work(PROMPT, trace=trace)))
        await node.desk.ended("r.1")

    on_one_node(play, ear)
    assert ear.spans == []
    assert len(said(lines)) == 1


async def _aborted(node: FakeNode) -> None:
    node.say(start("r.1", work(PROMPT)))
    node.say(abort("r.1", "deadline"))
    node.say(abort("r.1"))  # again: it is unknown by now


async def _router_gone(node: FakeNode) -> None:
    node.say(reserve("r.1", work(PROMPT)))
    await node.desk.reserved("r.1")
    node.front.session_closed(node.desk)
    node.front.session_opened(node.desk)


async def _failed(node: FakeNode) -> None:
    node.say(start("r.1", work(PROMPT)))
    node.rank.fail("r.1", "no_capacity")
    await node.desk.failed("r.1")


async def _refused(node: FakeNode) -> None:
    node.front.drain(5.0)
    node.say(start("r.1", work(PROMPT)))
    await node.desk.failed("r.1")


async def _given_up(node: FakeNode) -> None:
    node.say(reserve("r.1", work(PROMPT)))
    await node.desk.reserved("r.1")
    node.front.fail_all(Draining("the node stops"))


async def _too_late(node: FakeNode) -> None:
    node.say(reserve("r.1", work(PROMPT, deadline_s=0.05)))
    await node.desk.failed("r.1")


@pytest.mark.parametrize(
    ("happens", "outcome"),
    [
        (_aborted, "deadline_exceeded"), (_router_gone, "router_lost"), (_failed, "no_capacity"),
        (_refused, "draining"), (_given_up, "draining"), (_too_late, "deadline_exceeded"),
    ],
)  # fmt: skip
def test_whatever_ends_an_answer_it_has_one_line(
    lines: pytest.LogCaptureFixture,
    happens: Callable[[FakeNode], Awaitable[None]],
    outcome: str,
) -> None:
    on_one_node(happens)
    [line] = said(lines)
    assert line.startswith(f"answered id=r attempt=1 outcome={outcome} ")


@pytest.mark.parametrize(
    ("ending", "outcome"),
    [
        ("abort", "moved"), ("session", "router_lost"), ("rank", "internal_error"),
        ("give_up", "draining"), ("drained", "draining"),
    ],
)  # fmt: skip
def test_whatever_ends_a_prefill_it_has_one_line_and_one_span(
    lines: pytest.LogCaptureFixture, ending: str, outcome: str
) -> None:
    ear = Ear()

    async def go() -> None:
        async with fake_node(telemetry=ear) as reader, fake_node() as writer:
            writer.say(reserve("w.1", work(PROMPT)))
            reserved = await writer.desk.reserved("w.1")
            if ending == "drained":
                reader.front.drain(5.0)
            reader.rank.stall_at = 64
            reader.say(prefill("r.1", work(PROMPT, trace=TRACED), reserved.ticket))
            await asyncio.sleep(0)
            if ending == "abort":
                reader.say(abort("r.1", "moved"))
            elif ending == "session":
                reader.front.session_closed(reader.desk)
                reader.front.session_opened(reader.desk)
            elif ending == "rank":
                reader.rank.fail("r.1:prefill", "internal_error")
                await reader.desk.failed("r.1")
            elif ending == "give_up":
                reader.front.give_up(Draining("the node stops"))
            reader.rank.resume()
            await reader.until_empty()
            writer.say(abort("w.1"))
            await writer.until_empty()

    asyncio.run(go())
    [line] = [line for line in said(lines) if line.startswith("prefilled")]
    assert line.startswith(f"prefilled id=r attempt=1 outcome={outcome} ")
    if ending != "drained":  # it was refused before anybody had read who traces it
        assert [one.failed for one in ear.spans if one.kind is Kind.SERVER] == [outcome]


def test_the_source_of_a_pull_has_a_line_too(lines: pytest.LogCaptureFixture) -> None:
    text = "".join(chr(97 + n * n % 26) for n in range(150))

    async def play(region: LittleRegion) -> None:
        await region.answer(text, direct("s"))
        await region.answer(text, direct("d", pulling("s", 9)))

    in_a_region(play)
    [sent] = [line for line in said(lines) if line.startswith("sent")]
    assert " outcome=ok model=" in sent
    assert " prompt=144 held=144 kv_bytes=" in sent
    assert sum(line.startswith("answered") for line in said(lines)) == 2


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [("client_gone", "cancelled"), ("deadline", "deadline_exceeded"), ("moved", "moved"),
     ("failed", "failed"), ("of a release to come", "aborted")],
)  # fmt: skip
def test_outcomes_are_words_of_a_closed_set(reason: str, outcome: str) -> None:
    assert aborted(reason) == outcome
