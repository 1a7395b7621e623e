"""A sender with several streams: one transfer all the same."""

from __future__ import annotations

from core.kv.handoff import MAX_STREAMS, Incoming, Phase, Refusal
from core.kv.ticket import PieceKey
from tests.core.kv.test_handoff import MODEL, deliver, make_ticket, opened, phase_of


def test_several_streams_are_ready_only_when_all_have_ended() -> None:
    ticket = make_ticket((0, 1))
    incoming = Incoming(ticket, MODEL, now=0.0)
    say = (ticket.id, ticket.generation, MODEL)
    assert incoming.join(*say, now=0.0) is Refusal.CLOSED, "nobody has said hello yet"
    assert incoming.hello(*say, now=0.0) is None
    assert incoming.join("00" * 16, ticket.generation, MODEL, now=0.0) is Refusal.TICKET
    assert incoming.join(*say, now=0.0) is None
    first, second = PieceKey(0, 0, 0), PieceKey(0, 0, 1)
    assert incoming.begin(first, 64, now=0.0) is None
    assert incoming.begin(second, 64, now=0.0) is None
    assert incoming.end_piece(first, intact=True, now=0.0) is None
    assert incoming.end(32, now=0.0) is None
    assert incoming.join(*say, now=0.0) is Refusal.TAKEN, "the end has begun"
    assert phase_of(incoming) is Phase.RECEIVING
    assert incoming.end_piece(second, intact=True, now=0.0) is None
    assert incoming.end(32, now=0.0) is None
    assert phase_of(incoming) is Phase.READY


def test_several_streams_that_have_all_ended_without_every_piece_end_the_transfer() -> None:
    ticket = make_ticket((0, 1))
    incoming = opened(ticket)
    assert incoming.join(ticket.id, ticket.generation, MODEL, now=0.0) is None
    deliver(incoming, PieceKey(0, 0, 0))
    assert incoming.end(32, now=0.0) is None
    assert incoming.end(32, now=0.0) is Refusal.INCOMPLETE


def test_streams_are_bounded() -> None:
    ticket = make_ticket()
    incoming = opened(ticket)
    say = (ticket.id, ticket.generation, MODEL)
    answers = [incoming.join(*say, now=0.0) for _ in range(MAX_STREAMS)]
    assert answers == [None] * (MAX_STREAMS - 1) + [Refusal.TAKEN]
