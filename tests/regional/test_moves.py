"""An answer that is pushed out of a decode node's memory goes on elsewhere, through prefill."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from core.events import Accepted, Delta, Moved
from core.types import GenerateRequest, ResumePoint
from regional.attempt import MAX_MOVES
from regional.pb import node_pb2 as pb
from tests.regional.fake_node import FakeNode, attempt_of, work_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

TRIO = (("p1", "prefill"), ("d1", "decode"), ("d2", "decode"))
PAIR = TRIO[:2]
PROMPT = "y" * 200


async def handed_over(prefill: FakeNode, decode: FakeNode) -> pb.RouterMessage:
    """Play a hand-off up to the moment when decode may begin; what was reserved."""
    reserve = await decode.got("reserve")
    decode.reserved(attempt_of(reserve))
    await prefill.got("prefill")
    await decode.got("start")
    prefill.prefill_done(attempt_of(reserve))
    return reserve


def resumed(message: pb.RouterMessage) -> tuple[ResumePoint, ...]:
    return msgspec.msgpack.decode(work_of(message).request, type=GenerateRequest).resume


def test_it_goes_on_at_the_other_node_from_the_token_where_it_stood(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *TRIO) as here:
            prefill, first, second = [await here.joined(*one) for one in TRIO]
            async with here.stream(ask(PROMPT)) as stream:
                reserve = await handed_over(prefill, first)
                attempt = attempt_of(reserve)
                assert (work_of(reserve).move_min_tokens, resumed(reserve)) == (64, ())
                assert isinstance(await stream.next(), Accepted)
                first.output(attempt, delta("ab", 97, 98))
                assert await stream.next() == delta("ab", 97, 98)
                first.preempted(attempt, b"abc", chars_sent=2, computed=200)
                again = await handed_over(prefill, second)
                assert attempt_of(again) != attempt
                assert list(work_of(again).token_ids) == list(PROMPT.encode())
                assert resumed(again) == (
                    ResumePoint(choice=0, token_ids=(97, 98, 99), chars_sent=2),
                )
                assert work_of(again).spent == pb.Spent(
                    prompt_read=True, computed_tokens=200, decode_s=2.5
                )
                assert await stream.next() == Moved(
                    prefill=prefill.name, decode=second.name, reason="split"
                )
                second.output(attempt_of(again), delta("cd", 100), *ending(200, 4))
                assert await stream.rest() == [delta("cd", 100), *ending(200, 4)]
            assert first.unread() == second.unread() == []
            assert here.at_rest()

    run(test())


async def _played(here: Here, prefill: FakeNode, decode: FakeNode) -> list[int]:
    """The thresholds of attempts that are preempted until one may not be."""
    told: list[int] = []
    answer = here.asking(ask(PROMPT))
    while True:
        reserve = await handed_over(prefill, decode)
        told.append(work_of(reserve).move_min_tokens)
        attempt = attempt_of(reserve)
        if not told[-1]:
            decode.output(attempt, delta("end"), *ending())
            events = await answer
            assert sum(isinstance(event, Moved) for event in events) == len(told) - 1
            return told
        decode.output(attempt, delta("x"))
        decode.preempted(attempt, b"x" * len(told), chars_sent=len(told), computed=200)
        decode.beat()  # room again, or so it seems


def test_it_is_moved_so_often_and_then_keeps_its_node(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = [await here.joined(*one) for one in PAIR]
            assert await _played(here, prefill, decode) == [64] * MAX_MOVES + [0]

    run(test())


def test_without_a_prefill_node_nothing_moves(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            decode = await here.joined("d1", "decode")
            answer = here.asking(ask(PROMPT))
            start = await decode.got("start")
            assert work_of(start).move_min_tokens == 0
            decode.output(attempt_of(start), delta("x"), *ending())
            await answer

    run(test())


@pytest.mark.parametrize(
    ("tiers", "least"),
    [
        ([pb.Tier(kind="host")], 64),
        ([pb.Tier(kind="disk")], 0),
        ([pb.Tier(kind="disk"), pb.Tier(kind="host", off="no memory")], 0),
    ],
)
def test_a_node_that_saves_what_answers_lose_gives_them_back(
    tmp_path: Path, tiers: list[pb.Tier], least: int
) -> None:
    """Also where no prefill node is up."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            decode = await here.joined("d1", "decode")
            member = here.app.router.cluster.find(decode.name)
            assert member is not None
            decode.say(pb.NodeMessage(heartbeat=pb.Heartbeat(sequence=9, tiers=tiers)))
            await here.until(lambda: member.beat.sequence == 9)
            async with here.stream(ask(PROMPT)) as stream:
                start = await decode.got("start")
                assert work_of(start).move_min_tokens == least
                decode.output(attempt_of(start), delta("ab", 97, 98))
                if least:
                    decode.preempted(attempt_of(start), b"ab", chars_sent=2, computed=200)
                    decode.beat()
                    start = await decode.got("start")
                    assert resumed(start) == (
                        ResumePoint(choice=0, token_ids=(97, 98), chars_sent=2),
                    )
                decode.output(attempt_of(start), delta("c", 99), *ending())
                texts = [one.text for one in await stream.rest() if isinstance(one, Delta)]
                assert texts == ["ab", "c"]

    run(test())


def test_it_waits_for_room_before_those_that_came_later(tmp_path: Path) -> None:
    """The node that lost it is not asked before something has changed there, and nobody younger
    slips in meanwhile."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = [await here.joined(*one) for one in PAIR]
            here.background.append(here.asking(ask(PROMPT, request_id="old")))
            reserve = await handed_over(prefill, decode)
            decode.output(attempt_of(reserve), delta("x"))
            decode.preempted(attempt_of(reserve), b"x", chars_sent=1, computed=200)
            await here.queued(1)
            here.background.append(here.asking(ask("z" * 200, request_id="young")))
            await here.queued(2)
            assert decode.unread() == []
            decode.beat()
            asked = [attempt_of(await decode.got("reserve")) for _ in range(2)]
            assert [one.partition(".")[0] for one in asked] == ["old", "young"]

    run(test())


def test_a_node_lost_while_it_is_read_anew_costs_only_time(tmp_path: Path) -> None:
    """The client has text, and still nothing is lost: the router knows where the answer stands."""

    async def test() -> None:
        async with region(tmp_path, *TRIO) as here:
            prefill, first, second = [await here.joined(*one) for one in TRIO]
            answer = here.asking(ask(PROMPT))
            reserve = await handed_over(prefill, first)
            first.output(attempt_of(reserve), delta("a", 97))
            first.preempted(attempt_of(reserve), b"a", chars_sent=1, computed=200)
            await second.got("reserve")
            await second.die()
            first.beat()
            await prefill.got("abort")
            again = await handed_over(prefill, first)
            assert resumed(again)[0].token_ids == (97,)
            first.output(attempt_of(again), delta("b", 98), *ending())
            events = await answer
            assert [one for one in events if not isinstance(one, Accepted | Moved)] == [
                delta("a", 97), delta("b", 98), *ending(),
            ]  # fmt: skip

    run(test())
