"""A prompt read on one node and answered on another; aborts at every stage of it."""

from __future__ import annotations

import asyncio

import pytest

from core.engine import messages as m
from core.types import FinishReason
from tests.regional.node.desk import (
    abort,
    answer_text,
    done_of,
    finish_of,
    prefill,
    reserve,
    start,
    work,
)
from tests.regional.node.fakes import FakeNode
from tests.regional.node.pairs import (
    BLOCK_BYTES,
    PROMPT,
    hand_over,
    on_two_nodes,
    receiving,
    succeed,
)


@pytest.mark.parametrize("length", [2, 16, 17, 18, 33, 150])
def test_a_prompt_read_elsewhere_is_answered_as_if_read_here(length: int) -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        await hand_over(reader, writer, "a.1", PROMPT[:length])
        done = await reader.desk.prefill_done()
        writer.say(start("a.1", queued_s=0.5))
        events = await writer.desk.ended("a.1")
        assert answer_text(events) == "hello"
        assert finish_of(events) is FinishReason.STOP
        blocks = -(-(length - 1) // 16)
        assert done.kv_bytes == blocks * BLOCK_BYTES
        assert (done.computed_tokens, done.cached_tokens) == (length - 1, 0)
        answer = done_of(events)
        assert answer.usage.prompt_tokens == length
        assert answer.usage.cached_tokens == 0
        assert answer.timings.kv_bytes == blocks * BLOCK_BYTES
        assert answer.timings.transfer_s > 0
        assert answer.timings.queue_s == 0.5
        assert reader.front.kv_bytes_sent == writer.front.kv_bytes_received == done.kv_bytes
        assert [type(one) for one in reader.rank.commands] == [m.Prefill, m.Release]
        assert [type(one) for one in writer.rank.commands] == [m.Reserve, m.Begin]

    on_two_nodes(test)


def test_start_may_come_before_the_blocks() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        await hand_over(reader, writer, "a.1")
        writer.say(start("a.1"))
        await asyncio.sleep(0)
        assert not [one for one in writer.rank.commands if isinstance(one, m.Begin)]
        reader.rank.resume()
        assert answer_text(await writer.desk.ended("a.1")) == "hello"

    on_two_nodes(test)


def test_blocks_travel_while_later_ones_are_computed() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        await hand_over(reader, writer, "a.1")
        arrival = await receiving(writer)
        async with asyncio.timeout(30):
            while arrival.incoming.received_bytes < 4 * BLOCK_BYTES:
                await asyncio.sleep(0)
        assert arrival.incoming.received_bytes == 4 * BLOCK_BYTES
        reader.rank.resume()
        writer.say(start("a.1"))
        await writer.desk.ended("a.1")

    on_two_nodes(test)


@pytest.mark.parametrize(
    ("at_reader", "at_writer", "cached"), [(0, 2, 0), (4, 0, 64), (4, 2, 64), (2, 4, 32)]
)
def test_only_missing_blocks_travel_and_cached_means_that_nobody_computed(
    at_reader: int, at_writer: int, cached: int
) -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.cached, writer.rank.cached = at_reader, at_writer
        await hand_over(reader, writer, "a.1")
        writer.say(start("a.1"))
        usage = done_of(await writer.desk.ended("a.1")).usage
        assert usage.cached_tokens == cached
        assert (await reader.desk.prefill_done()).kv_bytes == (10 - at_writer) * BLOCK_BYTES

    on_two_nodes(test)


def test_a_ticket_for_nothing_needs_no_prefill() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.rank.cached = 10
        await hand_over(reader, writer, "a.1")
        done = await reader.desk.prefill_done()
        assert (done.computed_tokens, done.kv_bytes) == (0, 0)
        assert reader.rank.commands == []
        writer.say(start("a.1"))
        await writer.desk.ended("a.1")

    on_two_nodes(test)


def test_many_transfers_at_once() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        await asyncio.gather(*(succeed(reader, writer, f"{n}.1") for n in range(6)))
        await reader.until_empty()  # it hears of the end a little later
        assert reader.front.kv_bytes_sent == writer.front.kv_bytes_received == 60 * BLOCK_BYTES

    on_two_nodes(test)


# ---------------------------------------------------------------- aborts at every stage


def test_an_abort_before_the_rank_has_answered() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.rank.mute_reserve = True
        writer.say(reserve("a.1", work(PROMPT)))
        writer.say(abort("a.1"))
        writer.front.rank_said(
            0,
            m.Reserved(sequence=writer.rank.commands[0].sequence, cached_tokens=0, fill=({}, {})),  # type: ignore[union-attr] # it is the Reserve
        )
        assert not writer.desk.of("reserved")
        assert writer.empty

    on_two_nodes(test)


def test_an_abort_of_a_reservation() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.say(reserve("a.1", work(PROMPT)))
        reserved = await writer.desk.reserved("a.1")
        writer.say(abort("a.1"))
        assert writer.empty
        reader.say(prefill("a.1", work(PROMPT), reserved.ticket))
        failed = await reader.desk.failed("a.1")
        assert (failed.stage, failed.code, failed.retryable) == (
            "transfer", "transfer_failed", True,
        )  # fmt: skip

    on_two_nodes(test)


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_an_abort_within_the_transfer_ends_it_on_both_sides(who: str) -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        await hand_over(reader, writer, "a.1")
        writer.say(start("a.1"))
        await receiving(writer)
        aborted, other = (writer, reader) if who == "writer" else (reader, writer)
        aborted.say(abort("a.1"))
        failed = await other.desk.failed("a.1")
        assert (failed.stage, failed.code, failed.retryable) == (
            "transfer", "transfer_failed", True,
        )  # fmt: skip
        assert not aborted.desk.of("failed"), "an abort is not answered"
        assert isinstance(reader.rank.commands[-1], m.Abort)
        assert isinstance(writer.rank.commands[-1], m.Abort)

    on_two_nodes(test)


def test_an_abort_between_ready_and_start() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        await hand_over(reader, writer, "a.1")
        await reader.desk.prefill_done()
        writer.say(abort("a.1"))
        assert writer.empty
        writer.say(start("a.1"))
        assert (await writer.desk.failed("a.1")).stage == "transfer"

    on_two_nodes(test)


def test_an_abort_within_the_answer() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.rank.script = [104] * 1000
        await hand_over(reader, writer, "a.1")
        writer.say(start("a.1"))
        await writer.desk.until(lambda: len(writer.desk.outputs("a.1")) > 3)
        writer.say(abort("a.1"))
        assert writer.empty
        said = len(writer.desk.messages)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not writer.desk.outputs("a.1")[-1].last
        assert len(writer.desk.messages) == said

    on_two_nodes(test)


def test_an_abort_of_a_prefill_whose_task_has_not_begun() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.say(reserve("a.1", work(PROMPT)))
        reserved = await writer.desk.reserved("a.1")
        reader.say(prefill("a.1", work(PROMPT), reserved.ticket))
        reader.say(abort("a.1"))
        await reader.until_empty()
        assert not reader.desk.of("failed")
        writer.say(abort("a.1"))

    on_two_nodes(test)
