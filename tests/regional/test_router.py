"""One request's life through the real router: HTTP in, real sessions to nodes with a script."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from core.events import Accepted, Delta, Done, Fault, Finish, Moved
from core.types import GenerateRequest, PoolId
from tests.regional.fake_node import MODEL, FakeNode, attempt_of, work_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

PAIR = (("p1", "prefill"), ("d1", "decode"))


async def _pair(here: Here) -> tuple[FakeNode, FakeNode]:
    return await here.joined("p1", "prefill"), await here.joined("d1", "decode")


async def _handed_over(prefill: FakeNode, decode: FakeNode) -> str:
    """Play a hand-off up to the moment when decode may begin."""
    attempt = attempt_of(await decode.got("reserve"))
    decode.reserved(attempt)
    await prefill.got("prefill")
    await decode.got("start")
    prefill.prefill_done(attempt)
    return attempt


def test_split_order_and_streaming(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            request = ask("y" * 200)
            async with here.stream(request) as stream:
                reserve = await decode.got("reserve")
                attempt = attempt_of(reserve)
                assert attempt.startswith("r1.")
                assert list(work_of(reserve).token_ids) == [ord("y")] * 200
                bare = msgspec.msgpack.decode(work_of(reserve).request, type=GenerateRequest)
                assert bare.prompt is None
                assert bare.messages == ()
                assert (bare.model, bare.sampling, bare.seed) == (MODEL, request.sampling, 1)
                assert 0 < work_of(reserve).deadline_s <= 30
                assert prefill.unread() == []  # nothing is read before blocks are set aside
                decode.reserved(attempt)
                sent = (await prefill.got("prefill")).prefill
                assert sent.attempt_id == attempt
                assert sent.ticket.id == f"ticket {attempt}"
                start = (await decode.got("start")).start
                assert start.attempt_id == attempt
                assert not start.HasField("work")
                accepted = await stream.next()
                assert accepted == Accepted(
                    prefill=prefill.name, decode=decode.name, prompt_tokens=200, reason="split"
                )
                [weighed] = stream.placings
                assert (weighed.held_tokens, weighed.compute_tokens) == (0, 199)
                assert weighed.alone_s is not None
                assert weighed.split_s is not None
                assert weighed.split_s < weighed.alone_s
                prefill.prefill_done(attempt)
                for text in ("a", "b"):  # each delta is there before the next is made
                    decode.output(attempt, delta(text))
                    assert await stream.next() == delta(text)
                decode.output(attempt, *ending())
                assert await stream.rest() == [*ending()]
            assert prefill.unread() == decode.unread() == []  # nothing is aborted after the end
            assert here.at_rest()

    run(test())


def test_short_prompts_go_to_decode_alone(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask("short"))
            start = (await decode.got("start")).start
            assert bytes(start.work.token_ids) == b"short"
            decode.output(start.attempt_id, delta("z"), *ending(5, 1))
            events = await answer
            assert isinstance(events[0], Accepted)
            assert (events[0].prefill, events[0].reason) == (None, "short_remainder")
            assert events[1:] == [delta("z"), *ending(5, 1)]
            assert prefill.unread() == []

    run(test())


def test_one_token_is_never_split(tmp_path: Path) -> None:
    """B19: with a limit of 1 there is nothing to hand over."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            _, decode = await _pair(here)
            answer = here.asking(ask("y" * 1000, max_tokens=1))
            start = (await decode.got("start")).start
            assert len(start.work.token_ids) == 1000
            decode.output(start.attempt_id, delta("z"), *ending(1000, 1))
            assert (await answer)[0] == Accepted(
                prefill=None, decode=decode.name, prompt_tokens=1000, reason="one_token"
            )

    run(test())


def test_a_cached_prompt_is_not_read_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            first = here.asking(ask("y" * 200))
            attempt = await _handed_over(prefill, decode)
            decode.cache(1, snapshot=True, stored=_hashes(b"y" * 200))
            decode.output(attempt, delta("a"), *ending())
            await first
            second = here.asking(ask("y" * 200 + "z" * 40, request_id="r2"))
            start = (await decode.got("start")).start
            decode.output(start.attempt_id, delta("a"), *ending(240))
            events = await second
            assert isinstance(events[0], Accepted)
            assert (events[0].prefill, events[0].reason) == (None, "cached_on_decode")

    run(test())


def test_a_prompt_goes_to_the_pool_that_holds_it(tmp_path: Path) -> None:
    """Data-parallel attention: (node, dp rank) in events, placement and what nodes are told."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill = await here.joined("p1", "prefill")
            decode = here.node("d1", "decode")
            decode.join.pools = 3
            await decode.start()
            await here.until(lambda: len(here.app.router.cluster.view().nodes) == 4)
            decode.cache(1, snapshot=True)
            decode.cache(1, snapshot=True, stored=_hashes(b"y" * 80), pool=2)
            await here.until(lambda: here.app.router.index.size(PoolId(decode.name, 2)) == 5)
            split = here.asking(ask("y" * 80 + "x" * 1000))
            reserve = (await decode.got("reserve")).reserve
            assert reserve.pool == 2
            decode.reserved(reserve.attempt_id, cached=80)
            assert (await prefill.got("prefill")).prefill.pool == 0
            await decode.got("start")
            prefill.prefill_done(reserve.attempt_id)
            others: list[int] = []
            for number in (2, 3):  # what pool 2 does already counts against it alone
                short = here.asking(ask("z", request_id=f"r{number}"))
                start = (await decode.got("start")).start
                others.append(start.pool)
                decode.output(start.attempt_id, delta("a"), *ending(1))
                await short
            assert 2 not in others
            decode.output(reserve.attempt_id, delta("a"), *ending(1080))
            assert isinstance((await split)[0], Accepted)
            status = here.app.publisher.snapshot().nodes
            assert [one.blocks_total for one in status if one.name == "d1"] == [3 * 1024]
            await decode.die()
            await here.until(lambda: len(here.app.router.cluster.view().nodes) == 1)
            assert here.app.router.index.size(PoolId(decode.name, 2)) == 0
            assert here.at_rest()

    run(test())


def _hashes(token_ids: bytes) -> bytes:
    from core.prefix import block_hashes, block_root

    return b"".join(block_hashes(block_root(b"same", ""), list(token_ids)))


def test_prefill_node_lost_during_prefill(tmp_path: Path) -> None:
    """B20, and issue: placed again, the client notices nothing but time."""

    async def test() -> None:
        nodes = (*PAIR, ("p2", "prefill"))
        async with region(tmp_path, *nodes) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask())
            attempt = attempt_of(await decode.got("reserve"))
            decode.reserved(attempt)
            await prefill.got("prefill")
            await decode.got("start")
            other = await here.joined("p2", "prefill")
            await prefill.die()
            gone = (await decode.got("abort")).abort
            assert (gone.attempt_id, gone.reason) == (attempt, "moved")
            again = await _handed_over(other, decode)
            assert again != attempt
            decode.output(attempt, delta("late words of the lost attempt"))
            decode.output(again, delta("a"), *ending())
            events = await answer
            assert [type(event) for event in events] == [Accepted, Moved, Delta, Finish, Done]
            assert events[1] == Moved(prefill=other.name, decode=decode.name, reason="split")
            assert events[2] == delta("a")
            assert here.at_rest()

    run(test())


def test_without_another_prefill_node_decode_reads_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask())
            decode.reserved(attempt_of(await decode.got("reserve")))
            await prefill.got("prefill")
            await decode.got("start")
            await prefill.die()
            await decode.got("abort")
            start = (await decode.got("start")).start
            assert len(start.work.token_ids) == 200
            decode.output(start.attempt_id, delta("a"), *ending())
            events = await answer
            assert events[1] == Moved(prefill=None, decode=decode.name, reason="no_prefill_node")
            assert events[-1] == ending()[-1]

    run(test())


def test_failed_hand_off_ends_in_recompute(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask())
            attempt = attempt_of(await decode.got("reserve"))
            decode.reserved(attempt)
            await prefill.got("prefill")
            await decode.got("start")
            prefill.failed(attempt, "transfer", "transfer_failed")
            assert attempt_of(await decode.got("abort")) == attempt
            assert attempt_of(await prefill.got("abort")) == attempt
            start = (await decode.got("start")).start
            assert len(start.work.token_ids) == 200
            decode.output(start.attempt_id, delta("a"), *ending())
            events = await answer
            assert events[1] == Moved(prefill=None, decode=decode.name, reason="recompute")

    run(test())


def test_decode_node_lost_before_the_first_delta(tmp_path: Path) -> None:
    async def test() -> None:
        nodes = (*PAIR, ("d2", "decode"))
        async with region(tmp_path, *nodes) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask())
            attempt = await _handed_over(prefill, decode)
            other = await here.joined("d2", "decode")
            await decode.die()
            again = await _handed_over(prefill, other)
            assert again != attempt
            other.output(again, delta("a"), *ending())
            events = await answer
            assert [type(event) for event in events] == [Accepted, Moved, Delta, Finish, Done]
            assert here.at_rest()

    run(test())


def test_decode_node_lost_after_the_first_delta(tmp_path: Path) -> None:
    """B22: nothing is tried again once the client has text."""

    async def test() -> None:
        nodes = (*PAIR, ("d2", "decode"))
        async with region(tmp_path, *nodes) as here:
            prefill, decode = await _pair(here)
            other = await here.joined("d2", "decode")
            async with here.stream(ask()) as stream:
                attempt = await _handed_over(prefill, decode)
                decode.output(attempt, delta("a"))
                assert isinstance(await stream.next(), Accepted)
                assert await stream.next() == delta("a")
                await decode.die()
                [fault] = await stream.rest()
            assert isinstance(fault, Fault)
            assert (fault.code, fault.retryable) == ("node_lost", True)
            assert other.unread() == []
            assert here.at_rest()

    run(test())


def test_the_last_node_lost_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The caller hears that it was lost, the operator's log which one."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask())
            await _handed_over(prefill, decode)
            await decode.die()
            events = await answer
            assert isinstance(events[-1], Fault)
            assert (events[-1].code, events[-1].retryable) == ("node_lost", True)
            assert events[-1].message == "the node that computed this answer was lost"
            assert here.at_rest()

    with caplog.at_level("INFO"):
        run(test())
    (said,) = [one.message for one in caplog.records if "ends with node_lost" in one.message]
    assert said.endswith("ends with node_lost: decode node 'd1' was lost")


def test_refusals_that_are_not_retryable_reach_the_client(tmp_path: Path) -> None:
    """B20: the prefill side's refusal is the client's answer, and decode is freed at once."""

    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            prefill, decode = await _pair(here)
            answer = here.asking(ask())
            attempt = attempt_of(await decode.got("reserve"))
            decode.reserved(attempt)
            await prefill.got("prefill")
            await decode.got("start")
            prefill.failed(attempt, "prefill", "invalid_request", retryable=False)
            assert attempt_of(await decode.got("abort")) == attempt
            fault = (await answer)[-1]
            assert isinstance(fault, Fault)
            assert (fault.code, fault.message) == ("invalid_request", "scripted")
            assert here.at_rest()

    run(test())


def test_a_node_without_room_is_asked_again_when_something_changed(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *PAIR) as here:
            _, decode = await _pair(here)
            answer = here.asking(ask())
            for _ in range(6):  # more often than failures would be borne
                decode.failed(attempt_of(await decode.got("reserve")), "reserve", "no_capacity")
                await decode.got("abort")
                assert decode.unread() == []
                decode.beat()
            attempt = attempt_of(await decode.got("reserve"))
            decode.failed(attempt, "reserve", "invalid_request", retryable=False)
            assert [type(event) for event in await answer] == [Fault]

    run(test())


def test_endless_failures_end(tmp_path: Path) -> None:
    async def test() -> None:
        nodes = [(f"d{n}", "decode") for n in range(6)]

        def refuse(node: FakeNode, message: object) -> None:
            from regional.pb import node_pb2 as pb

            if isinstance(message, pb.RouterMessage) and message.HasField("start"):
                node.failed(message.start.attempt_id, "decode", "internal_error")

        async with region(tmp_path, *nodes) as here:
            for name, role in nodes:
                await here.joined(name, role, refuse)
            events = await here.events(ask())
            assert isinstance(events[0], Accepted)
            assert [type(event) for event in events[1:]] == [Moved] * 3 + [Fault]
            assert here.at_rest()

    run(test())
