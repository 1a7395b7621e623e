"""The hand-off's two machines: nothing is ever written outside RECEIVING, and nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import TransferFailed
from core.kv.handoff import (
    RECEIVING,
    SENDING,
    Failure,
    Incoming,
    Outgoing,
    Phase,
    Refusal,
    SendPhase,
)
from core.kv.ticket import Endpoint, PieceKey, Ticket, model_digest, new_ticket_id

MODEL = model_digest(b"model")
LEASE = 30.0


def make_ticket(
    blocks: tuple[int, ...] = (0, 1, 2), *, groups: int = 1, address: str = "memory"
) -> Ticket:
    endpoints = tuple(
        Endpoint(
            rank=0,
            address=address,
            group=group,
            layers=1,
            heads=1,
            dtype="uint8",
            block_bytes=64 * (group + 1),
            blocks=blocks,
        )
        for group in range(groups)
    )
    return Ticket(id=new_ticket_id(), generation=7, lease_s=LEASE, endpoints=endpoints)


def phase_of(incoming: Incoming) -> Phase:
    """As a call, which a type checker does not take to give the same value twice."""
    return incoming.phase


def opened(ticket: Ticket, now: float = 0.0) -> Incoming:
    incoming = Incoming(ticket, MODEL, now=now)
    assert incoming.hello(ticket.id, ticket.generation, MODEL, now=now) is None
    return incoming


def deliver(incoming: Incoming, key: PieceKey, now: float = 0.0) -> None:
    assert incoming.begin(key, 64 * (key.group + 1), now=now) is None
    assert incoming.may_write(key)
    assert incoming.end_piece(key, intact=True, now=now) is None


def test_a_transfer_is_ready_when_every_piece_of_every_endpoint_is_verified() -> None:
    ticket = make_ticket((0, 2), groups=2)
    incoming = opened(ticket)
    keys = [key for endpoint in ticket.endpoints for key in endpoint.pieces()]
    for number, key in enumerate(keys):
        assert incoming.missing == len(keys) - number
        deliver(incoming, key, now=float(number))
    assert phase_of(incoming) is Phase.RECEIVING
    assert incoming.end(33, now=9.0) is None
    assert phase_of(incoming) is Phase.READY
    assert incoming.computed_tokens == 33
    assert incoming.received_bytes == 2 * 64 + 2 * 128
    assert incoming.transfer_s == 3.0
    incoming.take()
    assert phase_of(incoming) is Phase.DONE


def test_a_ticket_without_missing_blocks_is_ready_at_once() -> None:
    ticket = make_ticket(())
    assert ticket.empty
    assert Incoming(ticket, MODEL, now=0.0).phase is Phase.READY


@pytest.mark.parametrize(
    ("ticket_id", "generation", "model"),
    [("00" * 16, 7, MODEL), (None, 6, MODEL), (None, 7, model_digest(b"another"))],
    ids=["ticket", "generation", "model"],
)
def test_a_strangers_hello_is_refused_and_does_no_harm(
    ticket_id: str | None, generation: int, model: bytes
) -> None:
    ticket = make_ticket()
    incoming = Incoming(ticket, MODEL, now=0.0)
    answer = incoming.hello(ticket_id or ticket.id, generation, model, now=0.0)
    assert answer is Refusal.TICKET
    assert phase_of(incoming) is Phase.RESERVED
    assert incoming.hello(ticket.id, ticket.generation, MODEL, now=0.0) is None
    assert incoming.hello(ticket.id, ticket.generation, MODEL, now=0.0) is Refusal.TAKEN
    assert phase_of(incoming) is Phase.RECEIVING


@pytest.mark.parametrize(
    ("key", "size"),
    [
        (PieceKey(0, 0, 0), 64),
        (PieceKey(0, 0, 9), 64),
        (PieceKey(0, 1, 1), 64),
        (PieceKey(1, 0, 1), 64),
        (PieceKey(0, 0, 1), 63),
    ],
    ids=["duplicate", "foreign block", "foreign group", "foreign rank", "size"],
)
def test_a_piece_that_is_not_expected_ends_the_transfer(key: PieceKey, size: int) -> None:
    incoming = opened(make_ticket())
    deliver(incoming, PieceKey(0, 0, 0))
    assert incoming.begin(key, size, now=0.0) is Refusal.PIECE
    assert incoming.failure is Failure.PEER_LOST
    assert not incoming.may_write(key)


def test_a_wrong_checksum_ends_the_transfer() -> None:
    incoming = opened(make_ticket())
    assert incoming.begin(PieceKey(0, 0, 0), 64, now=0.0) is None
    assert incoming.end_piece(PieceKey(0, 0, 0), intact=False, now=0.0) is Refusal.CHECKSUM
    assert incoming.failure is Failure.CHECKSUM


def test_an_end_with_pieces_missing_ends_the_transfer() -> None:
    incoming = opened(make_ticket())
    deliver(incoming, PieceKey(0, 0, 0))
    assert incoming.end(48, now=0.0) is Refusal.INCOMPLETE
    assert incoming.failure is Failure.PEER_LOST


def test_an_abort_within_a_piece_stops_the_writing() -> None:
    incoming = opened(make_ticket())
    seen: list[bool] = []
    key = PieceKey(0, 0, 0)
    assert incoming.begin(key, 64, now=0.0) is None
    seen.append(incoming.may_write(key))
    assert incoming.fail(Failure.ABORTED)
    seen.append(incoming.may_write(key))
    assert seen == [True, False]
    assert incoming.end_piece(key, intact=True, now=0.0) is Refusal.ABORTED
    assert incoming.received_bytes == 0
    assert not incoming.fail(Failure.CHECKSUM), "the first reason stays"
    assert incoming.failure is Failure.ABORTED


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    incoming = opened(make_ticket())
    for now in (29.0, 58.0, 87.0):
        assert incoming.renew(now=now) is None
        assert not incoming.tick(now)
    assert not incoming.tick(116.9)
    assert incoming.tick(117.0)
    assert incoming.failure is Failure.EXPIRED
    assert incoming.renew(now=117.0) is Refusal.EXPIRED


def test_a_sender_that_wakes_after_its_lease_cannot_write() -> None:
    incoming = opened(make_ticket())
    key = PieceKey(0, 0, 0)
    assert incoming.begin(key, 64, now=1.0) is None
    assert incoming.end_piece(key, intact=True, now=40.0) is Refusal.EXPIRED
    assert incoming.begin(PieceKey(0, 0, 1), 64, now=40.0) is Refusal.EXPIRED
    assert not incoming.may_write(key)


def test_a_lost_connection_matters_only_while_receiving() -> None:
    incoming = opened(make_ticket((0,)))
    deliver(incoming, PieceKey(0, 0, 0))
    incoming.end(16, now=0.0)
    assert not incoming.lost()
    assert phase_of(incoming) is Phase.READY
    other = opened(make_ticket((0,)))
    assert other.lost()
    assert other.failure is Failure.PEER_LOST


def test_blocks_cannot_be_taken_before_they_are_verified() -> None:
    incoming = opened(make_ticket())
    with pytest.raises(TransferFailed, match="receiving"):
        incoming.take()


# ---------------------------------------------------------------- the sender


def test_blocks_become_due_as_they_fill_and_the_partial_one_at_the_end() -> None:
    outgoing = Outgoing(make_ticket((0, 1, 2)), prompt_tokens=41, now=0.0)  # KV of 40 tokens
    assert outgoing.due(48, complete=False) == [], "nothing before the welcome"
    outgoing.opened(now=0.0)
    assert outgoing.due(15, complete=False) == []
    assert [key.block for key in outgoing.due(32, complete=False)] == [0, 1]
    assert outgoing.due(32, complete=False) == []
    with pytest.raises(TransferFailed, match="1 blocks"):
        outgoing.ended()
    assert [key.block for key in outgoing.due(40, complete=True)] == [2]
    outgoing.ended()
    outgoing.acknowledged()
    assert outgoing.phase is SendPhase.DONE


def test_only_the_blocks_that_the_receiver_misses_are_sent() -> None:
    outgoing = Outgoing(make_ticket((3, 1), groups=2), prompt_tokens=64, now=0.0)
    outgoing.opened(now=0.0)
    due = outgoing.due(63, complete=True)
    assert [(key.block, key.group) for key in due] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    outgoing.sent(due, now=0.0)
    assert outgoing.sent_bytes == 2 * 64 + 2 * 128


@pytest.mark.parametrize("block", [4, 1 << 20])
def test_a_ticket_for_blocks_past_the_prompt_is_refused(block: int) -> None:
    with pytest.raises(TransferFailed, match="past the end"):
        Outgoing(make_ticket((block,)), prompt_tokens=65, now=0.0)


def test_a_sender_renews_six_times_a_lease() -> None:
    outgoing = Outgoing(make_ticket(), prompt_tokens=48, now=0.0)
    outgoing.opened(now=0.0)
    assert outgoing.renew_in(2.0) == 3.0
    assert outgoing.renew_in(7.0) == 0.0
    outgoing.renewed(now=7.0)
    assert outgoing.renew_in(7.0) == 5.0


def test_a_failed_sender_has_nothing_due() -> None:
    outgoing = Outgoing(make_ticket(), prompt_tokens=48, now=0.0)
    outgoing.opened(now=0.0)
    assert outgoing.fail(Failure.ABORTED)
    assert not outgoing.fail(Failure.PEER_LOST)
    assert outgoing.due(47, complete=True) == []
    with pytest.raises(TransferFailed):
        outgoing.ended()


@pytest.mark.parametrize("over", [Phase.DONE, Phase.FAILED])
def test_nothing_leaves_the_last_phases_of_a_receiver(over: Phase) -> None:
    assert not [start for start, _ in RECEIVING if start is over]


@pytest.mark.parametrize("over", [SendPhase.DONE, SendPhase.FAILED])
def test_nothing_leaves_the_last_phases_of_a_sender(over: SendPhase) -> None:
    assert not [start for start, _ in SENDING if start is over]


# ---------------------------------------------------------------- any order of events

PIECES = st.builds(PieceKey, st.integers(0, 1), st.integers(0, 2), st.integers(0, 4))


class Receiver(RuleBasedStateMachine):
    """Feeds an Incoming anything in any order, against a model of what may have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.ticket = make_ticket((0, 1, 3), groups=2)
        self.expected = {key for one in self.ticket.endpoints for key in one.pieces()}
        self.now = 0.0
        self.incoming = Incoming(self.ticket, MODEL, now=0.0)
        self.verified: set[PieceKey] = set()
        self.opened: set[PieceKey] = set()
        self.streams = 0
        self.over = False
        self.last_word = 0.0

    @rule(right=st.booleans())
    def hello(self, right: bool) -> None:
        before = self.incoming.phase
        generation = self.ticket.generation + (0 if right else 1)
        answer = self.incoming.hello(self.ticket.id, generation, MODEL, now=self.now)
        if answer is None:
            assert right
            assert before is Phase.RESERVED
            self.last_word = self.now
            self.streams = 1

    @rule()
    def join(self) -> None:
        before = self.incoming.phase
        answer = self.incoming.join(self.ticket.id, self.ticket.generation, MODEL, now=self.now)
        if answer is None:
            assert before is Phase.RECEIVING
            self.streams += 1

    @rule(key=PIECES, size=st.sampled_from([64, 128, 65]))
    def begin(self, key: PieceKey, size: int) -> None:
        before = self.incoming.phase
        answer = self.incoming.begin(key, size, now=self.now)
        if answer is None:
            assert before is Phase.RECEIVING
            assert key in self.expected - self.verified - self.opened
            assert size == 64 * (key.group + 1)
            self.opened.add(key)

    @precondition(lambda self: self.incoming.phase == Phase.RECEIVING)
    @rule()
    def begin_expected(self) -> None:
        left = sorted(self.expected - self.verified - self.opened)
        if left:
            self.begin(left[0], 64 * (left[0].group + 1))

    @rule(key=PIECES, intact=st.sampled_from([True, True, True, False]))
    def end_piece(self, key: PieceKey, intact: bool) -> None:
        answer = self.incoming.end_piece(key, intact=intact, now=self.now)
        if answer is None:
            assert intact
            assert key in self.opened
            self.verified.add(key)
            self.last_word = self.now
        self.opened.discard(key)

    @precondition(lambda self: self.opened)
    @rule()
    def end_expected(self) -> None:
        self.end_piece(min(self.opened), True)

    @rule()
    def end(self) -> None:
        if self.incoming.end(49, now=self.now) is None:
            self.streams -= 1
            assert self.streams or self.verified == self.expected
            self.last_word = self.now

    @rule(seconds=st.sampled_from([0.0, 5.0, 29.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.incoming.tick(self.now):
            assert self.now - self.last_word >= LEASE

    @rule()
    def renew(self) -> None:
        if self.incoming.renew(now=self.now) is None:
            self.last_word = self.now

    @rule(failure=st.sampled_from(Failure))
    def fail(self, failure: Failure) -> None:
        self.incoming.fail(failure)
        self.opened.clear()

    @rule()
    def lose(self) -> None:
        self.incoming.lost()

    @precondition(lambda self: self.incoming.phase == Phase.READY)
    @rule()
    def take(self) -> None:
        self.incoming.take()
        assert self.verified == self.expected

    @invariant()
    def writes_only_while_receiving(self) -> None:
        for key in self.expected:
            if self.incoming.may_write(key):
                assert self.incoming.phase == Phase.RECEIVING
                assert key in self.opened

    @invariant()
    def ready_means_complete(self) -> None:
        if self.incoming.phase in (Phase.READY, Phase.DONE):
            assert self.verified == self.expected

    @invariant()
    def the_end_is_the_end(self) -> None:
        if self.over:
            assert self.incoming.over
        self.over = self.incoming.over
        assert (self.incoming.failure is not None) == (self.incoming.phase == Phase.FAILED)


Receiver.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestReceiver = Receiver.TestCase
