"""When queued requests run, give way, are tried again and are given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BY_CODE, IncompleteStream, InternalError
from core.events import Accepted, Delta, Done, Event, Fault, Finish, ToolCallDelta
from core.types import FinishReason, NodeName, Usage
from regional.queue.rules import (
    MAX_PAUSE_S,
    MAX_TRIES,
    SHARE,
    Again,
    Answered,
    Room,
    after_restart,
    again,
    ended,
    joined,
    room,
)

DONE = Done(usage=Usage(prompt_tokens=3, completion_tokens=2))
END: tuple[Event, ...] = (Finish(reason=FinishReason.STOP), DONE)
ROOMS = st.builds(
    Room,
    slots=st.integers(0, 300),
    taken=st.integers(0, 300),
    waiting=st.integers(0, 300),
    held=st.integers(0, 300),
    draining=st.booleans(),
)


@given(ROOMS)
def test_never_more_than_the_share_nor_where_somebody_waits(view: Room) -> None:
    more = room(view)
    if view.waiting or view.draining:
        assert more == -view.held
    else:
        assert view.held + more <= max(1, int(view.slots * SHARE))
        assert more <= max(0, view.slots - view.taken)
        assert view.held + more >= 0


def test_an_idle_region_is_used() -> None:
    assert room(Room(slots=32, taken=0, waiting=0, held=0)) == 16
    assert room(Room(slots=32, taken=16, waiting=0, held=16)) == 0
    assert room(Room(slots=1, taken=0, waiting=0, held=0)) == 1
    assert room(Room(slots=0, taken=0, waiting=0, held=0)) == 0
    assert room(Room(slots=8, taken=2, waiting=0, held=6)) == -2  # a node left


def test_a_whole_answer_in_few_words() -> None:
    call = [
        ToolCallDelta(index=0, id="c", name="f"),
        ToolCallDelta(index=0, arguments="{}"),
    ]
    events: list[Event] = [
        Accepted(prefill=None, decode=NodeName("d"), prompt_tokens=3),
        Delta(token_ids=(1,), text="a", reasoning="x"),
        Delta(choice=1, token_ids=(4,), text="c"),
        Delta(token_ids=(2,), text="b", tool_calls=(call[0],)),
        Delta(token_ids=(3,), reasoning="y", tool_calls=(call[1],)),
        Finish(choice=1, reason=FinishReason.LENGTH),
        *END,
    ]
    assert joined(events) == (
        Delta(text="ab", reasoning="xy", tool_calls=tuple(call)),
        Delta(choice=1, text="c"),
        Finish(choice=1, reason=FinishReason.LENGTH),
        *END,
    )
    assert ended(events, 0) == Answered(joined(events))


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_a_failure_that_passes_is_tried_again(code: str) -> None:
    kind = BY_CODE[code]
    fault = Fault(code=code, message="why", retry_after_s=None)
    passes = kind.retryable or kind is InternalError
    for tries in range(MAX_TRIES):
        outcome = ended([Delta(text="lost"), fault], tries)
        if passes and tries + 1 < MAX_TRIES:
            assert isinstance(outcome, Again)
            assert outcome.tries == tries + 1
        else:
            assert outcome == Answered((fault,))


def test_a_stream_without_its_end_is_a_failure() -> None:
    for events in ([], [Delta(text="a")], [Delta(text="a"), END[0]]):
        assert isinstance(ended(events, 0), Again)
        outcome = ended(events, MAX_TRIES - 1)
        assert isinstance(outcome, Answered)
        [fault] = outcome.events
        assert isinstance(fault, Fault)
        assert fault.code == IncompleteStream.code


def test_pauses_grow_and_end() -> None:
    pauses = [again(tries).pause_s for tries in range(12)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S
    busy = Fault(code="no_capacity", message="", retry_after_s=7.5)
    assert ended([busy], 0) == Again(1, 7.5)


def test_what_takes_the_region_down_is_not_begun_for_ever() -> None:
    tries, restarts = 0, 0
    while isinstance(outcome := after_restart(tries), Again):
        tries, restarts = outcome.tries, restarts + 1
    assert restarts == MAX_TRIES - 1
    [fault] = outcome.events
    assert isinstance(fault, Fault)
    assert fault.code == InternalError.code
