"""What a decode node says of an answer whose blocks went to others, and how another goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from core.engine import messages as m
from core.engine.plan import SequenceId
from core.events import Event
from core.types import FinishReason, GenerateRequest, Sampling
from regional.node.answer import Answer, Spent, Transfer
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import answer_ids, answer_text, done_of, finish_of, start, work
from tests.regional.node.fake_rank import END
from tests.regional.node.fakes import FakeNode, fake_node

PROMPT = tuple(range(40))
SPOKEN = [*"é天🦙 stop, here.".encode(), END]


async def spoken(node: FakeNode, tokens: int, given: pb.Work) -> list[Event]:
    """Let the node answer until so many tokens are out, or to its end."""

    def out() -> bool:
        over = any(one.last for one in node.desk.outputs("a.1"))
        return over or len(answer_ids(node.desk.events("a.1"))) >= tokens

    node.say(start("a.1", given))
    await node.desk.until(out)
    node.rank.paused = True
    return node.desk.events("a.1")


def preempted(node: FakeNode, *, cached: int = 0, read: int | None = None) -> pb.Preempted:
    """The rank gives the answer back; what the node says of it."""
    node.rank.give_back("a.1", cached=cached, read=read)
    (message,) = node.desk.of("preempted")
    assert node.empty, "nothing of it is left here"
    return message.preempted


async def moved(after: Sequence[int], sampling: Sampling) -> tuple[list[Event], int]:
    """The whole answer, given back after so many tokens each time; and how often it was."""
    events: list[Event] = []
    given = work(PROMPT, sampling)
    moves = 0
    for tokens in after:
        async with fake_node() as node:
            node.rank.script = SPOKEN
            events += await spoken(node, tokens, given)
            if node.rank.held == 0:
                return events, moves
            left = preempted(node)
            moves += 1
            assert bytes(left.token_ids) == bytes(answer_ids(events))
            given = work(
                PROMPT,
                sampling,
                resume=tuple(left.token_ids),
                chars_sent=left.chars_sent,
                spent=left.spent,
            )
    async with fake_node() as node:
        node.rank.script = SPOKEN
        node.rank.cached = 2  # read before, on some node: no hit of this request
        node.say(start("a.1", given))
        return events + await node.desk.ended("a.1"), moves


SAMPLINGS = {
    "whole": Sampling(),
    "stop string": Sampling(stop=("here",)),
    "no stop string": Sampling(stop=("stop there",)),
    "length": Sampling(max_tokens=12),
    "length in a character": Sampling(max_tokens=7),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_one_wherever_it_was_moved(name: str) -> None:
    """B16: half-sent characters and half-matched stop strings carry on, nothing is sent twice, and
    usage counts each token once."""

    async def test() -> None:
        wanted, _ = await moved((), SAMPLINGS[name])
        alone = done_of(wanted).usage
        assert alone.cached_tokens == 32
        for tokens in range(1, len(answer_ids(wanted))):
            for after in ((tokens,), (tokens, 1), (tokens, 1, 2)):
                events, moves = await moved(after, SAMPLINGS[name])
                assert moves > 0
                assert answer_text(events) == answer_text(wanted), after
                assert answer_ids(events) == answer_ids(wanted), after
                assert finish_of(events) == finish_of(wanted)
                usage = done_of(events).usage
                assert usage.completion_tokens == alone.completion_tokens
                assert usage.prompt_tokens == alone.prompt_tokens
                assert usage.cached_tokens == 0, "the first attempt computed all of it"

    asyncio.run(test())


def test_one_that_has_said_nothing_yet_is_given_back_too() -> None:
    async def test() -> None:
        async with fake_node() as node:
            node.rank.paused = True
            node.say(start("a.1", work(PROMPT)))
            left = preempted(node)
            assert (list(left.token_ids), left.chars_sent) == ([], 0)
            assert (left.spent.prompt_read, left.spent.computed_tokens) == (False, 40)

    asyncio.run(test())


def test_one_that_was_reading_its_prompt_counts_each_token_of_it_once() -> None:
    """Usage says as cached what nobody computed for this request: not what its own first attempt
    had left in a cache."""

    async def test() -> None:
        async with fake_node() as node:
            node.rank.paused = True
            node.say(start("a.1", work(PROMPT)))
            left = preempted(node, cached=8, read=24)
        async with fake_node() as node:
            node.rank.cached = 1
            node.say(start("a.1", work(PROMPT, spent=left.spent)))
            assert done_of(await node.desk.ended("a.1")).usage.cached_tokens == 8

    asyncio.run(test())


def test_what_two_attempts_computed_is_counted_once() -> None:
    prompt = 6
    for cached_first, read, cached in itertools.product(range(7), repeat=3):
        if cached_first > read or cached == prompt:
            continue
        before = Spent(computed_tokens=read - cached_first, read_tokens=read)
        computed = {*range(cached_first, read), *range(cached, prompt)}
        assert before.computed_with(prompt - cached, prompt) == len(computed)
        assert before.computed_with(0, 0) == before.computed_tokens, "not read at all"


def test_what_it_took_before_counts_in_the_timings() -> None:
    async def test() -> None:
        spent = pb.Spent(
            prompt_read=True, computed_tokens=30, prefill_s=100.0, decode_s=200.0, kv_bytes=7
        )
        async with fake_node() as node:
            node.say(start("a.1", work(PROMPT, resume=(104,), spent=spent)))
            done = done_of(await node.desk.ended("a.1"))
        assert done.usage.cached_tokens == 10
        assert done.timings.prefill_s == 100.0
        assert 200.0 < done.timings.decode_s < 260.0
        assert done.timings.kv_bytes == 7

    asyncio.run(test())


@pytest.mark.parametrize(
    ("sampling", "moves"),
    [(Sampling(), 16), (Sampling(n=2), 0), (Sampling(logprobs=1), 0)],
    ids=["one", "choices", "logprobs"],
)
def test_only_what_can_be_told_from_its_tokens_moves(sampling: Sampling, moves: int) -> None:
    async def test() -> None:
        async with fake_node() as node:
            node.say(start("a.1", work(PROMPT, sampling, move=16)))
            await node.desk.ended("a.1")
            (first, *_) = [one for one in node.rank.commands if isinstance(one, m.Run)]
            assert first.spec.move_min_tokens == moves

    asyncio.run(test())


def test_an_answer_that_its_text_ended_meanwhile_is_not_given_back() -> None:
    async def test() -> None:
        async with fake_node() as node:
            node.rank.script = SPOKEN
            node.rank.per_step = 30
            node.say(start("a.1", work(PROMPT, Sampling(stop=("stop",)))))
            events = await node.desk.ended("a.1")
            assert finish_of(events) is FinishReason.STOP
            given = m.GivenBack(sequence=SequenceId("a.1"), computed_tokens=40)
            node.front.rank_said(0, m.Stepped(given_back=(given,), stats=node.rank.stats()))
            assert not node.desk.of("preempted")

    asyncio.run(test())


class Silent:
    """A text model that nobody asks for text."""

    end_ids: frozenset[int] = frozenset()

    def writer(self, *given: object, **more: object) -> None: ...


@pytest.mark.parametrize("cached", [0, 16])
def test_the_last_token_of_a_prompt_is_never_cached(cached: int) -> None:
    """A hand-off brought all others, and before that one was computed the answer had to go on
    elsewhere."""
    request = msgspec.msgpack.decode(work(PROMPT).request, type=GenerateRequest)
    specs = [m.SequenceSpec(token_ids=PROMPT, max_tokens=4)]
    text: Any = Silent()
    answer = Answer(request, specs, text, placed_at=0.0)
    answer.transfer = Transfer(computed_tokens=len(PROMPT) - 1 - cached)
    left = answer.left(computed_tokens=0, now=1.0)
    again = Answer(request, specs, text, placed_at=1.0, spent=left.spent)
    assert again.standing(2.0).usage.cached_tokens == cached
