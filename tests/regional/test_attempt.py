"""The attempt as a state machine, and what follows a failure: no sockets."""

from __future__ import annotations

import pytest

from core.errors import NoCapacity, NodeLost, RequestError, TransferFailed
from core.types import NodeName, PoolId
from regional.attempt import MAX_TRIES, Again, Attempt, Failure, Send, Side, after
from regional.cluster import Work
from regional.costs import PullPlan
from regional.pb import node_pb2 as pb
from regional.placement import Placement, Reason
from tests.regional.fakes import ask

P, D = PoolId(NodeName("p"), 2), PoolId(NodeName("d"), 1)
RESERVED = pb.Reserved(attempt_id="r.1", ticket=pb.Ticket(id="t"))
DELTA = pb.SequenceOutput(attempt_id="r.1", delta=True)
LAST = pb.SequenceOutput(attempt_id="r.1", last=True)


def attempt(prefill: PoolId | None = P) -> Attempt:
    placement = Placement(prefill, D, Reason.SPLIT, compute_tokens=3, cached_tokens=0)
    return Attempt("r.1", placement, ask(), [1, 2, 3, 4])


def kinds(sends: list[Send]) -> list[tuple[str, str | None]]:
    return [(send.to.value, send.message.WhichOneof("body")) for send in sends]


def test_split() -> None:
    one = attempt()
    assert kinds(one.begin(deadline_s=1, queued_s=0)) == [("decode", "reserve")]
    assert kinds(one.reserved(RESERVED, deadline_s=1)) == [
        ("prefill", "prefill"), ("decode", "start"),
    ]  # fmt: skip
    assert one.reserved(RESERVED, deadline_s=1) == []  # said twice
    one.prefill_done()
    one.output(DELTA)
    assert [one.visible, one.over] == [True, False]
    one.output(LAST)
    assert [one.visible, one.over] == [True, True]
    assert one.abort("failed") == []


def test_who_is_told_to_forget_it() -> None:
    one = attempt()
    one.begin(deadline_s=1, queued_s=0)
    assert kinds(one.abort("moved")) == [("prefill", "abort"), ("decode", "abort")]
    one.reserved(RESERVED, deadline_s=1)
    one.prefill_done()
    assert kinds(one.abort("moved")) == [("decode", "abort")]
    early = attempt()
    early.output(LAST)  # ended before the prefill node was through
    assert kinds(early.abort("failed")) == [("prefill", "abort")]
    assert kinds(attempt(prefill=None).abort("deadline")) == [("decode", "abort")]


def test_a_prefill_node_that_is_through_may_go() -> None:
    one = attempt()
    assert one.gone(Side.PREFILL) is not None
    done = attempt()
    done.prefill_done()
    assert done.gone(Side.PREFILL) is None
    late = pb.Failed(attempt_id="r.1", stage="transfer", code="transfer_failed", retryable=True)
    assert done.failed(Side.PREFILL, late) is None
    assert not done.over
    seen = attempt()
    seen.output(DELTA)  # the hand-off must be over, whatever the prefill node has still to say
    assert seen.gone(Side.PREFILL) is None
    assert seen.gone(Side.DECODE) is not None


def test_an_unknown_code_of_a_newer_node() -> None:
    failure = attempt().failed(Side.DECODE, pb.Failed(code="new_kind", message="m"))
    assert failure is not None
    assert (failure.error.code, failure.retryable) == ("internal_error", False)


LOST = Failure(Side.PREFILL, "lost", NodeLost("x"), retryable=True)
NO_ROOM = Failure(Side.DECODE, "reserve", NoCapacity("x"), retryable=True)
BROKEN = Failure(Side.DECODE, "transfer", TransferFailed("x"), retryable=True)
FATAL = Failure(Side.PREFILL, "prefill", NodeLost("x"), retryable=False)


@pytest.mark.parametrize(
    ("failure", "visible", "tries", "decision"),
    [
        (LOST, False, 1, Again(Side.PREFILL, exclude=True)),
        (LOST, True, 1, LOST.error),
        (LOST, False, MAX_TRIES, LOST.error),
        (BROKEN, False, 1, Again(Side.DECODE, recompute=True)),
        (NO_ROOM, False, MAX_TRIES, Again(Side.DECODE, refuse=True)),
        (FATAL, False, 1, FATAL.error),
    ],
)
def test_after(failure: Failure, visible: bool, tries: int, decision: Again | RequestError) -> None:
    assert after(failure, visible=visible, tries=tries) == decision


def test_work_is_given_back_exactly_once() -> None:
    work = Work()
    reading = work.charge(prefill_tokens=10)
    both = work.charge(prefill_tokens=5, answer_tokens=2)
    assert (work.prefills, work.prefill_tokens, work.sequences, work.answer_tokens) == (2, 15, 1, 2)
    for _ in range(3):  # more tokens than expected never count below zero
        both.generated()
    assert work.answer_tokens == 0
    for _ in range(2):
        both.prompt_read()
        both.release()
        reading.release()
    assert (work.prefills, work.prefill_tokens, work.sequences, work.answer_tokens) == (0, 0, 0, 0)


# ---------------------------------------------------------------- a pull beside it

S = PoolId(NodeName("s"), 3)
PLAN = PullPlan(S, first=2, count=4, patience_s=0.7)
PULLING = pb.Pulling(attempt_id="r.1", ticket=pb.Ticket(id="for the pull"))


def puller(prefill: PoolId | None = None) -> Attempt:
    placement = Placement(prefill, D, Reason.COMBINED, compute_tokens=3, cached_tokens=0, pull=PLAN)
    return Attempt("r.1", placement, ask(), [1, 2, 3, 4])


@pytest.mark.parametrize(("prefill", "reader"), [(None, "decode"), (P, "prefill")])
def test_a_reader_pulls_what_the_plan_says(prefill: PoolId | None, reader: str) -> None:
    one = puller(prefill)
    sends = one.begin(deadline_s=1, queued_s=0)
    if prefill is not None:
        assert not sends[0].message.reserve.work.pull_tokens, "it is the reader that pulls"
        sends = one.reserved(RESERVED, deadline_s=1)
    body = sends[0].message.start if prefill is None else sends[0].message.prefill
    assert (body.work.pull_tokens, body.work.pull_s) == (96, 0.7)
    (send,) = one.pulling(PULLING, deadline_s=1)
    assert send.to is Side.SOURCE
    assert (send.message.send.tokens, send.message.send.pool) == (96, 3)
    assert send.message.send.ticket.id == "for the pull"
    assert not send.message.send.work.pull_tokens
    assert one.pulling(PULLING, deadline_s=1) == []  # said twice
    assert one.sent(pb.Sent(attempt_id="r.1", tokens=96)) == []
    assert kinds(one.abort("failed"))[-1] == ("decode", "abort")
    assert ("source", "abort") not in kinds(one.abort("failed"))
    assert kinds(one.pulling(PULLING, deadline_s=1)) == [(reader, "proceed")]


@pytest.mark.parametrize("prefill", [None, P])
def test_a_source_that_fails_holds_nobody_up(prefill: PoolId | None) -> None:
    reader = "decode" if prefill is None else "prefill"
    early = puller(prefill)
    assert early.source_over() == []  # nobody waits for it yet
    assert kinds(early.pulling(PULLING, deadline_s=1)) == [(reader, "proceed")]
    late = puller(prefill)
    late.pulling(PULLING, deadline_s=1)
    assert ("source", "abort") in kinds(late.abort("client_gone"))
    assert kinds(late.source_over()) == [(reader, "proceed")]
    assert late.source_over() == []
    assert not late.over
    short = puller(prefill)
    short.pulling(PULLING, deadline_s=1)
    assert kinds(short.sent(pb.Sent(tokens=32, lacking_tokens=64))) == [(reader, "proceed")]
    unasked = attempt(prefill)
    assert kinds(unasked.pulling(PULLING, deadline_s=1)) == [(reader, "proceed")]
