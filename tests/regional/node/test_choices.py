"""Several choices of one request: one prompt, one stream, nothing left held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from core.engine import messages as m
from core.engine.plan import Scores, SequenceId
from core.errors import NodeLost
from core.events import Delta, Done, Event, Finish
from core.types import FinishReason, Sampling
from tests.regional.node.desk import abort, done_of, fault_of, reserve, start, work
from tests.regional.node.fake_rank import END
from tests.regional.node.fakes import VOCAB, FakeNode, fake_node

PROMPT = tuple(range(40))
THREE = Sampling(n=3)


def on_node(test: Callable[[FakeNode], Awaitable[None]]) -> None:
    async def go() -> None:
        async with fake_node() as node:
            await test(node)
            await node.until_empty()

    asyncio.run(go())


def texts(events: Sequence[Event], choices: int = 3) -> list[str]:
    deltas = [one for one in events if isinstance(one, Delta)]
    return ["".join(d.text for d in deltas if d.choice == index) for index in range(choices)]


def runs(node: FakeNode) -> list[m.Run]:
    return [one for one in node.rank.commands if isinstance(one, m.Run)]


def ends(events: Sequence[Event]) -> dict[int, FinishReason]:
    given = [one for one in events if isinstance(one, Finish)]
    assert len({one.choice for one in given}) == len(given)
    return {one.choice: one.reason for one in given}


def test_the_others_begin_when_the_prompt_is_in_the_cache() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.paused = True
        node.say(start("a.1", work(PROMPT, THREE)))
        assert [one.sequence for one in runs(node)] == ["a.1"]
        node.rank.resume()
        events = await node.desk.ended("a.1")
        assert [one.sequence for one in runs(node)] == ["a.1", "a.1:1", "a.1:2"]
        assert [one.spec.choice for one in runs(node)] == [0, 1, 2]
        assert len({(one.spec.token_ids, one.spec.seed) for one in runs(node)}) == 1
        assert texts(events) == ["hello"] * 3
        assert ends(events) == dict.fromkeys(range(3), FinishReason.STOP)
        assert [isinstance(one, Done) for one in events] == [False] * (len(events) - 1) + [True]
        usage = done_of(events).usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (40, 18)
        assert usage.cached_tokens == 0, "the prompt is counted once"
        assert [one.last for one in node.desk.outputs("a.1")].count(True) == 1

    on_node(test)


def test_a_reserved_request_reserves_once() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.cached = 3  # all of its full blocks: nothing has to come
        node.say(reserve("a.1", work(PROMPT, THREE)))
        await node.desk.reserved("a.1")
        node.say(start("a.1"))
        events = await node.desk.ended("a.1")
        kinds = [type(one) for one in node.rank.commands]
        assert kinds[:2] == [m.Reserve, m.Begin]
        assert kinds.count(m.Run) == 2
        assert texts(events) == ["hello"] * 3

    on_node(test)


def test_a_first_choice_of_one_token_is_enough_to_begin() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT, Sampling(n=2, max_tokens=1))))
        events = await node.desk.ended("a.1")
        assert texts(events, 2) == ["h", "h"]
        assert done_of(events).usage.completion_tokens == 2

    on_node(test)


def test_a_stop_string_ends_one_choice_at_a_time() -> None:
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT, Sampling(n=2, stop=("ll",)))))
        events = await node.desk.ended("a.1")
        assert texts(events, 2) == ["he", "he"]
        aborted = [one.sequence for one in node.rank.commands if isinstance(one, m.Abort)]
        assert aborted == ["a.1", "a.1:1"], "each when it was cut"

    on_node(test)


@pytest.mark.parametrize("how", ["abort", "session", "deadline", "rank", "sequence", "writer"])
def test_however_it_ends_all_choices_are_gone(how: str) -> None:
    async def test(node: FakeNode) -> None:
        if how == "writer":
            node.rank.script = [*b"hel", 299, *b"never"]
        else:
            node.rank.script = [*b"hel"] * 200
        deadline_s = 1.0 if how == "deadline" else 60.0
        node.say(start("a.1", work(PROMPT, THREE, deadline_s=deadline_s)))
        node.say(start("b.1", work(PROMPT, Sampling(max_tokens=2))))
        await node.desk.until(lambda: len(runs(node)) == 4)
        if how == "abort":
            node.say(abort("a.1"))
        elif how == "session":
            node.front.session_closed(node.desk)
            node.front.session_opened(node.desk)
        elif how == "rank":
            node.front.fail_all(NodeLost("rank 0 was killed"))
        elif how == "sequence":
            await node.desk.until(lambda: len(texts(node.desk.events("a.1"))[1]) > 2)
            node.rank.fail("a.1:1", "no_capacity")
        codes = {
            "deadline": "deadline_exceeded", "rank": "node_lost",
            "sequence": "no_capacity", "writer": "internal_error",
        }  # fmt: skip
        if how in codes:
            node.rank.paused = how == "deadline"
            assert fault_of(await node.desk.ended("a.1")).code == codes[how]
        assert not node.rank.held or how not in ("session", "rank")

    on_node(test)


def test_log_probabilities_go_with_their_choice() -> None:
    async def test(node: FakeNode) -> None:
        node.rank.paused = True
        node.say(start("a.1", work(PROMPT, Sampling(logprobs=1))))
        (run,) = runs(node)
        assert run.spec.logprobs == 1
        node.front.rank_said(
            0,
            m.Stepped(
                outputs=(
                    m.TokenOutput(
                        sequence=SequenceId("a.1"), token_ids=(104,), scores=(Scores(-0.5),)
                    ),
                ),
                stats=node.rank.stats(),
            ),
        )
        (delta,) = node.desk.events("a.1")
        assert isinstance(delta, Delta)
        assert [one.logprob for one in delta.logprobs] == [-0.5]
        node.say(abort("a.1"))

    on_node(test)


def test_what_the_caller_asked_for_reaches_the_rank() -> None:
    async def test(node: FakeNode) -> None:
        wanted = Sampling(
            min_p=0.5, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=-1.0,
            logit_bias=((5, 2.0),), min_tokens=3, stop_token_ids=(7,), logprobs=4,
        )  # fmt: skip
        node.rank.paused = True
        node.say(start("a.1", work(PROMPT, wanted)))
        (run,) = runs(node)
        spec = run.spec
        assert (spec.min_p, spec.min_tokens, spec.logprobs) == (0.5, 3, 4)
        assert (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty) == (
            1.5, 1.0, -1.0,
        )  # fmt: skip
        assert spec.logit_bias == ((5, 2.0),)
        assert spec.stop_ids == {END, 7}
        node.say(abort("a.1"))

    on_node(test)


@pytest.mark.parametrize(
    "wanted", [Sampling(logit_bias=((VOCAB, 1.0),)), Sampling(n=0)], ids=["bias", "n"]
)
def test_what_a_router_should_have_refused_is_refused(wanted: Sampling) -> None:  # B10
    async def test(node: FakeNode) -> None:
        node.say(start("a.1", work(PROMPT, wanted)))
        assert (await node.desk.failed("a.1")).code == "invalid_request"
        assert node.rank.commands == []

    on_node(test)
