"""One node's front with a rank of the test's own: text, limits, failures, and nothing left held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from core.engine import messages as m
from core.errors import NodeLost
from core.events import Delta
from core.types import FinishReason, Sampling
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import (
    abort,
    answer_ids,
    answer_text,
    done_of,
    fault_of,
    finish_of,
    reserve,
    start,
    work,
)
from tests.regional.node.fake_rank import END
from tests.regional.node.fakes import CONTEXT, VOCAB, FakeNode, fake_node

PROMPT = tuple(range(40))


def on_node(test: Callable[[FakeNode], Awaitable[None]]) -> None:
    async def go() -> None:
        async with fake_node() as node:
            await test(node)
            await node.until_empty()

    asyncio.run(go())


def test_a_prompt_read_here_is_answered_in_frames() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT), queued_s=0.25))
        events = await node.desk.ended("a.1")
        assert answer_text(events) == "hello"
        assert answer_ids(events) == [*b"hello", END]
        assert finish_of(events) is FinishReason.STOP
        done = done_of(events)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (40, 6)
        assert done.usage.cached_tokens == 0
        assert done.timings.queue_s == 0.25
        assert done.timings.kv_bytes == 0
        outputs = node.desk.outputs("a.1")
        assert [one.last for one in outputs] == [False] * 5 + [True]
        assert all(one.delta for one in outputs)
        assert not [one for one in node.rank.commands if isinstance(one, m.Abort)]

    on_node(test)


def test_all_sequences_of_a_step_come_in_one_message() -> None:
    async def test(node: FakeNode) -> None:
        for name in ("a.1", "b.1", "c.1"):
            node.say(start(name, work(PROMPT)))
        await asyncio.gather(*(node.desk.ended(name) for name in ("a.1", "b.1", "c.1")))
        sizes = [len(one.step_output.sequences) for one in node.desk.of("step_output")]
        assert sizes == [3] * 6

    on_node(test)


def test_what_the_cache_holds_is_not_counted_as_computed() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.cached = 2
        node.say(start("a.1", work(PROMPT)))
        assert done_of(await node.desk.ended("a.1")).usage.cached_tokens == 32

    on_node(test)


@pytest.mark.parametrize("per_step", [1, 2, 6])
@pytest.mark.parametrize(
    ("stops", "text"),
    [(("STUVWXY",), "PQR"), (("RSTU",), "PQ"), (("UVW", "XYZ"), "PQRST"), (("123",), None)],
)
def test_a_stop_string_over_several_tokens_is_never_sent(
    stops: tuple[str, ...], text: str | None, per_step: int
) -> None:  # B02
    async def test(node: FakeNode) -> None:
        node.rank.script = [*b"PQRSTUVWXYZ", END]
        node.rank.per_step = per_step
        node.say(start("a.1", work(PROMPT, Sampling(stop=stops))))
        events = await node.desk.ended("a.1")
        assert answer_text(events) == (text or "PQRSTUVWXYZ")
        assert finish_of(events) is FinishReason.STOP
        assert done_of(events).usage.completion_tokens == len(answer_ids(events))
        aborted = [one for one in node.rank.commands if isinstance(one, m.Abort)]
        if per_step == 1:  # with more, the rank may have come to its own end in the same step
            assert bool(aborted) == (text is not None), "the rank stops when the text has"
        if text is not None:
            ended = next(stop for stop in stops if stop in "PQRSTUVWXYZ")
            assert bytes(answer_ids(events)).decode().endswith(ended)

    on_node(test)


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_answer_that_is_resumed_when_it_is_whole_ends_at_once(handed_over: bool) -> None:
    """Its tokens complete a stop string already: there is nothing to wait for."""

    async def test(node: FakeNode) -> None:
        node.rank.script = [*b"xyz"] * 2000
        given = work(PROMPT, Sampling(stop=("ll",)), resume=tuple(b"hell"))
        if handed_over:
            node.rank.cached = 3  # all of its full blocks: nothing has to come
            node.say(reserve("a.1", given))
            await node.desk.reserved("a.1")
            node.say(start("a.1"))
        else:
            node.say(start("a.1", given))
        events = await node.desk.ended("a.1")
        assert (answer_text(events), finish_of(events)) == ("he", FinishReason.STOP)
        assert done_of(events).usage.completion_tokens == 4
        assert not any(isinstance(one, m.Run) for one in node.rank.commands)

    on_node(test)


@pytest.mark.parametrize("limit", range(1, 12))
def test_characters_are_whole_or_held_back(limit: int) -> None:  # B01
    spoken = "é天🦙".encode()

    async def test(node: FakeNode) -> None:
        node.rank.script = [*spoken, END]
        node.say(start("a.1", work(PROMPT, Sampling(max_tokens=limit))))
        events = await node.desk.ended("a.1")
        produced = bytes(token for token in answer_ids(events) if token != END)
        assert produced == spoken[:limit]
        assert answer_text(events) == spoken[:limit].decode(errors="replace")
        pieces = [event.text for event in events if isinstance(event, Delta)]
        assert not any("�" in piece for piece in pieces[:-1])
        assert finish_of(events) is (
            FinishReason.LENGTH if limit <= len(spoken) else FinishReason.STOP
        )
        assert done_of(events).usage.completion_tokens == min(limit, len(spoken) + 1)

    on_node(test)


def test_one_token_is_one_token() -> None:  # B19
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT, Sampling(max_tokens=1))))
        events = await node.desk.ended("a.1")
        assert finish_of(events) is FinishReason.LENGTH
        assert done_of(events).usage.completion_tokens == 1

    on_node(test)


def test_a_first_token_that_ends_the_turn_gives_an_empty_answer() -> None:  # B19
    async def test(node: FakeNode) -> None:
        node.rank.script = [END]
        node.say(start("a.1", work(PROMPT)))
        events = await node.desk.ended("a.1")
        assert answer_text(events) == ""
        assert finish_of(events) is FinishReason.STOP
        assert done_of(events).usage.completion_tokens == 1

    on_node(test)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (work([]), "invalid_request"),
        (work([1, VOCAB]), "invalid_request"),
        (work([1], Sampling(stop_token_ids=(VOCAB,))), "invalid_request"),
        (work([1] * CONTEXT), "context_length_exceeded"),
        (work([1] * (CONTEXT - 5), Sampling(max_tokens=6)), "context_length_exceeded"),
        (work([1], resume=(VOCAB,)), "invalid_request"),
        (work([1], resume=(-1,)), "invalid_request"),
        (pb.Work(request=b"nonsense", token_ids=[1]), "invalid_request"),
    ],
    ids=["empty", "vocabulary", "stop id", "context", "limit", "resumed", "negative", "bytes"],
)
def test_work_that_does_not_fit_is_refused_before_the_rank_hears_of_it(
    given: pb.Work, code: str
) -> None:  # B10, B12
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", given))
        node.say(reserve("b.1", given))
        for name, stage in (("a.1", "decode"), ("b.1", "reserve")):
            failed = await node.desk.failed(name)
            assert (failed.code, failed.stage, failed.retryable) == (code, stage, False)
        assert node.rank.commands == []

    on_node(test)


def test_a_deadline_before_the_first_token_is_a_failure() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.paused = True
        node.say(start("a.1", work(PROMPT, deadline_s=0.02)))
        failed = await node.desk.failed("a.1")
        assert (failed.code, failed.retryable) == ("deadline_exceeded", False)

    on_node(test)


def test_a_deadline_within_the_answer_is_a_fault() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT, deadline_s=1.0)))
        await node.desk.until(lambda: bool(node.desk.outputs("a.1")))
        node.rank.paused = True
        events = await node.desk.ended("a.1")
        assert fault_of(events).code == "deadline_exceeded"
        assert node.desk.outputs("a.1")[-1].last
        assert not node.desk.of("failed")

    on_node(test)


def test_a_sequence_that_fails_in_the_rank_fails_alone() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.paused = True
        node.say(start("a.1", work(PROMPT)))
        node.say(start("b.1", work(PROMPT)))
        node.rank.fail("a.1", "no_capacity")
        failed = await node.desk.failed("a.1")
        assert (failed.stage, failed.code, failed.retryable) == ("decode", "no_capacity", True)
        node.rank.resume()
        await node.desk.until(lambda: bool(node.desk.outputs("b.1")))
        node.rank.fail("b.1", "a code of tomorrow")
        fault = fault_of(await node.desk.ended("b.1"))
        assert (fault.code, fault.retryable) == ("internal_error", False)

    on_node(test)


def test_a_fault_in_one_answers_text_leaves_the_others_alone() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.script = [*b"ok", 299, *b"never", END]
        node.say(start("a.1", work(PROMPT)))
        node.say(start("b.1", work(PROMPT, Sampling(max_tokens=2))))
        assert fault_of(await node.desk.ended("a.1")).code == "internal_error"
        assert answer_text(await node.desk.ended("b.1")) == "ok"

    on_node(test)


def test_the_end_of_the_rank_ends_every_request() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT)))
        await node.desk.until(lambda: bool(node.desk.outputs("a.1")))
        node.rank.paused = True
        node.say(start("b.1", work(PROMPT)))
        node.front.fail_all(NodeLost("rank 0 was killed"))
        fault = fault_of(await node.desk.ended("a.1"))
        assert (fault.code, fault.retryable) == ("node_lost", True)
        assert (await node.desk.failed("b.1")).code == "node_lost"

    on_node(test)


def test_a_closed_session_aborts_what_came_through_it() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.paused = True
        node.say(start("a.1", work(PROMPT)))
        node.say(reserve("b.1", work(PROMPT)))
        await node.desk.reserved("b.1")
        node.front.session_closed(node.desk)
        assert node.empty
        assert not node.desk.of("failed")
        node.front.session_opened(node.desk)

    on_node(test)


def test_a_draining_node_refuses_work_and_ends_what_runs_too_long() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT)))
        await node.desk.until(lambda: bool(node.desk.outputs("a.1")))
        node.rank.paused = True
        node.say(reserve("b.1", work(PROMPT)))
        node.say(pb.RouterMessage(drain=pb.Drain(grace_s=0.02)))
        node.say(start("c.1", work(PROMPT)))
        assert (await node.desk.failed("c.1")).code == "draining"
        assert fault_of(await node.desk.ended("a.1")).code == "draining"
        failed = await node.desk.failed("b.1")
        assert (failed.code, failed.retryable) == ("draining", True)

    on_node(test)


def test_an_abort_of_anything_is_idempotent() -> None:
    async def test(node: FakeNode) -> None:
        node.say(abort("never heard of"))
        node.say(start("a.1", work(PROMPT)))
        node.say(abort("a.1"))
        node.say(abort("a.1"))
        assert node.empty

    on_node(test)


def test_the_same_attempt_twice_is_one_attempt() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT)))
        node.say(start("a.1", work(PROMPT)))
        assert answer_text(await node.desk.ended("a.1")) == "hello"
        assert len([one for one in node.rank.commands if isinstance(one, m.Run)]) == 1

    on_node(test)


def test_a_router_hears_what_the_cache_holds_then_what_changes() -> None:
    async def test(node: FakeNode) -> None:
        one, two, three = (bytes([n]) * 16 for n in (1, 2, 3))
        stats = node.rank.stats()
        node.front.rank_said(0, m.Stepped(stored=(one, two), stats=stats))
        node.front.rank_said(0, m.Stepped(evicted=(one,), stored=(three,), stats=stats))
        late = type(node.desk)()
        node.front.session_opened(late)
        node.front.rank_said(0, m.Stepped(evicted=(two,), stored=(one,), stats=stats))
        first = [one.cache_events for one in node.desk.of("cache_events")]
        began = first[0].sequence
        assert [(e.sequence - began, e.snapshot) for e in first] == [
            (0, True), (1, False), (2, False), (3, False),
        ]  # fmt: skip
        snapshot, change = (one.cache_events for one in late.of("cache_events"))
        assert (snapshot.sequence - began, snapshot.snapshot) == (2, True)
        assert snapshot.stored == two + three
        assert (change.sequence - began, change.snapshot) == (3, False)
        assert (change.stored, change.evicted) == (one, two)
        node.front.session_closed(late)

    on_node(test)
