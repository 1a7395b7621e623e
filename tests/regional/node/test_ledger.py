"""What one router is told of another's work, and how fast KV was seen to leave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kv.ticket import PieceKey, Ticket
from core.kv.transports.base import Piece
from regional.node.bandwidth import LEAST_BYTES, Bandwidth, MeasuredCarrier
from regional.node.ledger import Account, Ledger
from regional.pb import node_pb2 as pb

WORK = pb.Work(compute_tokens=500, answer_tokens=100, sequences=1)


def start(attempt: str, *, pool: int = 0) -> pb.RouterMessage:
    return pb.RouterMessage(start=pb.Start(attempt_id=attempt, work=WORK, pool=pool))


def output(attempt: str, *, last: bool = False) -> pb.NodeMessage:
    said = pb.SequenceOutput(attempt_id=attempt, delta=True, last=last)
    return pb.NodeMessage(step_output=pb.StepOutput(sequences=[said]))


def pair(pools: int = 1) -> tuple[Ledger, Account, Account, list[Account]]:
    told: list[Account] = []
    ledger = Ledger(pools, told.append)
    return ledger, ledger.open(), ledger.open(), told


def counts(work: pb.PoolWork) -> tuple[int, int, int, int]:
    return work.prefills, work.prefill_tokens, work.sequences, work.answer_tokens


def test_only_the_others_work_is_told_and_its_life_followed() -> None:
    ledger, mine, theirs, told = pair()
    mine.heard(start("m"))
    theirs.heard(start("t"))
    assert counts(ledger.others(mine)[0]) == (1, 500, 1, 100)
    assert told == [mine, theirs]
    theirs.said(output("t"))
    assert counts(ledger.others(mine)[0]) == (0, 0, 1, 99)
    theirs.said(output("t", last=True))
    assert ledger.others(mine) == []
    assert counts(ledger.others(theirs)[0]) == (1, 500, 1, 100)
    mine.close()
    assert ledger.others(theirs) == []


@pytest.mark.parametrize(
    "end",
    [
        pb.NodeMessage(failed=pb.Failed(attempt_id="t", stage="prefill")),
        pb.NodeMessage(prefill_done=pb.PrefillDone(attempt_id="t")),
        pb.NodeMessage(preempted=pb.Preempted(attempt_id="t")),
        pb.RouterMessage(abort=pb.Abort(attempt_id="t")),
    ],
    ids=["failed", "read", "preempted", "aborted"],
)
def test_every_end_is_seen(end: pb.NodeMessage | pb.RouterMessage) -> None:
    ledger, mine, theirs, _ = pair()
    prefill = pb.Prefill(attempt_id="t", work=pb.Work(compute_tokens=300))
    theirs.heard(pb.RouterMessage(prefill=prefill))
    assert counts(ledger.others(mine)[0]) == (1, 300, 0, 0)
    if isinstance(end, pb.RouterMessage):
        theirs.heard(end)
    else:
        theirs.said(end)
    assert ledger.others(mine) == []


def test_a_reservation_counts_once_and_a_failed_pull_ends_nothing() -> None:
    ledger, mine, theirs, _ = pair()
    reserve = pb.Reserve(attempt_id="t", work=pb.Work(answer_tokens=64, sequences=2))
    theirs.heard(pb.RouterMessage(reserve=reserve))
    theirs.heard(pb.RouterMessage(start=pb.Start(attempt_id="t")))
    theirs.said(pb.NodeMessage(failed=pb.Failed(attempt_id="t", stage="send")))
    assert counts(ledger.others(mine)[0]) == (0, 0, 2, 64)


def test_pools_are_told_apart() -> None:
    ledger, mine, theirs, _ = pair(pools=3)
    theirs.heard(start("t", pool=2))
    theirs.heard(start("nowhere", pool=9))
    assert [counts(one)[2] for one in ledger.others(mine)] == [0, 0, 1]


_step = st.tuples(st.sampled_from(("start", "delta", "last", "abort", "failed")), st.integers(0, 3))


@given(st.lists(_step, max_size=30))
def test_nothing_is_counted_that_has_ended(steps: list[tuple[str, int]]) -> None:
    ledger, mine, theirs, _ = pair()
    open_: set[int] = set()
    for kind, number in steps:
        name = str(number)
        match kind:
            case "start":
                theirs.heard(start(name))
                open_.add(number)
            case "delta":
                theirs.said(output(name))
            case "last":
                theirs.said(output(name, last=True))
                open_.discard(number)
            case "abort":
                theirs.heard(pb.RouterMessage(abort=pb.Abort(attempt_id=name)))
                open_.discard(number)
            case "failed":
                failed = pb.Failed(attempt_id=name, stage="decode")
                theirs.said(pb.NodeMessage(failed=failed))
                open_.discard(number)
    told = ledger.others(mine)
    assert (told[0].sequences if told else 0) == len(open_)


class _Shipment:
    """Takes a second for each send and half of one to finish."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    async def send(self, pieces: object) -> None:
        self._clock[0] += 1.0

    async def renew(self) -> None:
        self._clock[0] += 9.0

    async def finish(self, computed_tokens: int) -> None:
        self._clock[0] += 0.5

    async def close(self) -> None:
        self._clock[0] += 9.0


class _Carrier:
    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    async def open(self, *_: object) -> _Shipment:
        self._clock[0] += 9.0
        return _Shipment(self._clock)


def test_only_the_time_of_sending_is_measured() -> None:
    clock, bandwidth = [0.0], Bandwidth()
    carrier = MeasuredCarrier(_Carrier(clock), bandwidth, lambda: clock[0])
    piece = Piece(PieceKey(0, 0, 0), (memoryview(bytes(LEAST_BYTES)),))

    async def ship() -> None:
        shipment = await carrier.open(Ticket("t", 1, 30.0, ()), b"", lambda _: None)
        await shipment.send([piece, piece])
        clock[0] += 20.0  # the next chunk is computed
        await shipment.renew()
        await shipment.send([piece])
        await shipment.finish(0)
        await shipment.close()

    asyncio.run(ship())
    assert bandwidth.bytes_per_s == 3 * LEAST_BYTES / 2.5


def test_bandwidth_follows_what_is_seen_and_ignores_what_is_too_small() -> None:
    bandwidth = Bandwidth()
    bandwidth.note(LEAST_BYTES - 1, 1.0)
    assert bandwidth.bytes_per_s == 0.0
    bandwidth.note(10**9, 1.0)
    assert bandwidth.bytes_per_s == 1e9
    for _ in range(60):
        bandwidth.note(10**8, 1.0)
    assert bandwidth.bytes_per_s == pytest.approx(1e8, rel=0.01)
