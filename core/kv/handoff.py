"""One KV hand-off: who may write what, and until when. No I/O; the clock is passed in.

Whoever wants KV sets blocks aside and gives a `Ticket`; whoever computes it, or holds it, sends
each missing block once as a *piece*. `Incoming` is the receiver's half, `Outgoing` the sender's.

Rules for whoever edits this file: every change of phase goes through one of the two tables; what
is not in the table cannot happen. Nothing may be written outside RECEIVING, also not the rest of
a piece that has begun: a transport asks `Incoming.may_write` before every single write, and whoever
ends a transfer stops the transport before the blocks are given back to the rank. A sender may use
several streams; a stream has one piece open at a time.

::

    receiver   RESERVED → RECEIVING → READY → DONE        from any of the first three: FAILED
    sender     OFFERED  → SENDING   → SENT  → DONE        from any of the first three: FAILED
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from enum import StrEnum

from core.errors import TransferFailed
from core.kv.ticket import PieceKey, Ticket
from core.types import BLOCK_TOKENS

RENEWALS_PER_LEASE = 6
MAX_STREAMS = 8


class Phase(StrEnum):
    """Where the receiving half stands."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"


class SendPhase(StrEnum):
    """Where the sending half stands."""

    OFFERED = "offered"
    SENDING = "sending"
    SENT = "sent"
    DONE = "done"
    FAILED = "failed"


class Failure(StrEnum):
    """Why a transfer failed."""

    EXPIRED = "expired"
    ABORTED = "aborted"
    CHECKSUM = "checksum"
    PEER_LOST = "peer_lost"


class Refusal(StrEnum):
    """What a receiver answers to a sender whose word it does not accept."""

    TICKET = "ticket"
    """Unknown, of another generation, or of another model. One answer for all three: a guesser
    learns nothing."""
    TAKEN = "taken"
    """Another connection serves this ticket."""
    CLOSED = "closed"
    """The transfer is over."""
    PIECE = "piece"
    """Not among the expected pieces, here already, or of the wrong size."""
    CHECKSUM = "checksum"
    INCOMPLETE = "incomplete"
    """The sender said that it has ended, with pieces missing."""
    EXPIRED = "expired"
    ABORTED = "aborted"
    PROTOCOL = "protocol"
    """Bytes that are no message of ours."""


class Event(StrEnum):
    """What moves either half; ARCHITECTURE.md says who brings each about."""

    OPEN = "open"
    COMPLETE = "complete"
    CLOSE = "close"
    FAIL = "fail"


RECEIVING: dict[tuple[Phase, Event], Phase] = {
    (Phase.RESERVED, Event.OPEN): Phase.RECEIVING,
    (Phase.RESERVED, Event.COMPLETE): Phase.READY,  # no block is missing
    (Phase.RECEIVING, Event.COMPLETE): Phase.READY,
    (Phase.READY, Event.CLOSE): Phase.DONE,
    (Phase.RESERVED, Event.FAIL): Phase.FAILED,
    (Phase.RECEIVING, Event.FAIL): Phase.FAILED,
    (Phase.READY, Event.FAIL): Phase.FAILED,
}

SENDING: dict[tuple[SendPhase, Event], SendPhase] = {
    (SendPhase.OFFERED, Event.OPEN): SendPhase.SENDING,
    (SendPhase.SENDING, Event.COMPLETE): SendPhase.SENT,
    (SendPhase.SENT, Event.CLOSE): SendPhase.DONE,
    (SendPhase.OFFERED, Event.FAIL): SendPhase.FAILED,
    (SendPhase.SENDING, Event.FAIL): SendPhase.FAILED,
    (SendPhase.SENT, Event.FAIL): SendPhase.FAILED,
}


class Incoming:
    """The receiver's half of one transfer.

    Methods that take a message from the sender answer None, or the refusal to send back. A
    refused hello leaves the transfer as it was (a stranger cannot harm it); any other refusal
    fails it, because the bytes that follow on the connection make no sense any more.
    """

    def __init__(self, ticket: Ticket, model: bytes, *, now: float) -> None:
        self.ticket = ticket
        self.phase = Phase.RESERVED
        self.failure: Failure | None = None
        self.computed_tokens = 0
        self.received_bytes = 0
        self.expires_at = now + ticket.lease_s
        self._model = model
        self._sizes = {
            key: endpoint.block_bytes for endpoint in ticket.endpoints for key in endpoint.pieces()
        }
        self._missing = set(self._sizes)
        self._open: set[PieceKey] = set()
        self._streams = 0
        self._ended_streams = 0
        self._first_byte_at: float | None = None
        self._last_byte_at: float | None = None
        if not self._missing:
            self._move(Event.COMPLETE)

    @property
    def over(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    def may_write(self, key: PieceKey) -> bool:
        """Whether bytes of a piece that has begun may be written now."""
        return self.phase is Phase.RECEIVING and key in self._open

    @property
    def missing(self) -> int:
        return len(self._missing)

    @property
    def first_missing(self) -> int | None:
        """The first block of the prompt that is not verified in all its pieces, also of a transfer
        that has failed: a verified piece is never written again."""
        return min((key.block for key in self._missing), default=None)

    def size(self, key: PieceKey) -> int:
        """Bytes of an expected piece."""
        return self._sizes[key]

    @property
    def closed(self) -> Refusal:
        """What a sender is told for whom it is too late."""
        if self.failure is Failure.EXPIRED:
            return Refusal.EXPIRED
        if self.failure is Failure.ABORTED:
            return Refusal.ABORTED
        return Refusal.CLOSED

    @property
    def transfer_s(self) -> float:
        """From the first byte to the last verified one."""
        if self._first_byte_at is None or self._last_byte_at is None:
            return 0.0
        return self._last_byte_at - self._first_byte_at

    def hello(self, ticket_id: str, generation: int, model: bytes, *, now: float) -> Refusal | None:
        """The sender presents its ticket; `model` is a `model_digest`."""
        self.tick(now)
        if not self._is_ours(ticket_id, generation, model):
            return Refusal.TICKET
        if self.phase is Phase.RECEIVING:
            return Refusal.TAKEN
        if self.phase is not Phase.RESERVED:
            return self.closed
        self._move(Event.OPEN)
        self._streams = 1
        self._renew(now)
        return None

    def join(self, ticket_id: str, generation: int, model: bytes, *, now: float) -> Refusal | None:
        """A further stream of the sender whose hello was accepted. The ticket is proof enough: a
        second sender with the same ticket has had its hello refused."""
        self.tick(now)
        if not self._is_ours(ticket_id, generation, model):
            return Refusal.TICKET
        if self.phase is not Phase.RECEIVING:
            return self.closed
        if self._streams == MAX_STREAMS or self._ended_streams:
            return Refusal.TAKEN
        self._streams += 1
        return None

    def begin(self, key: PieceKey, size: int, *, now: float) -> Refusal | None:
        """A piece's header came; when None is returned, its bytes may be written."""
        self.tick(now)
        if self.phase is not Phase.RECEIVING:
            return self.closed
        if key in self._open or key not in self._missing or size != self._sizes[key]:
            self.fail(Failure.PEER_LOST)
            return Refusal.PIECE
        self._open.add(key)
        if self._first_byte_at is None:
            self._first_byte_at = now
        return None

    def end_piece(self, key: PieceKey, *, intact: bool, now: float) -> Refusal | None:
        """All bytes of an open piece are in place; `intact`: they match their checksum."""
        self.tick(now)
        if self.phase is not Phase.RECEIVING:
            return self.closed
        if key not in self._open:
            self.fail(Failure.PEER_LOST)
            return Refusal.PROTOCOL
        self._open.remove(key)
        if not intact:
            self.fail(Failure.CHECKSUM)
            return Refusal.CHECKSUM
        self._missing.remove(key)
        self.received_bytes += self._sizes[key]
        self._last_byte_at = now
        self._renew(now)
        return None

    def end(self, computed_tokens: int, *, now: float) -> Refusal | None:
        """The sender has sent all on one of its streams, and computed `computed_tokens` of the
        prompt for it. READY once it has said so on all of them."""
        self.tick(now)
        if self.phase is not Phase.RECEIVING:
            return self.closed
        self._ended_streams += 1
        if self._ended_streams < self._streams:
            self._renew(now)
            return None
        if self._missing or self._open:
            self.fail(Failure.PEER_LOST)
            return Refusal.INCOMPLETE
        self.computed_tokens = computed_tokens
        self._renew(now)
        self._move(Event.COMPLETE)
        return None

    def renew(self, *, now: float) -> Refusal | None:
        self.tick(now)
        if self.phase is not Phase.RECEIVING:
            return self.closed
        self._renew(now)
        return None

    def lost(self) -> bool:
        """The connection ended. True when that fails the transfer; after READY it does not."""
        return self.phase is Phase.RECEIVING and self.fail(Failure.PEER_LOST)

    def tick(self, now: float) -> bool:
        """Let the lease run out. True when that has failed the transfer just now."""
        return not self.over and now >= self.expires_at and self.fail(Failure.EXPIRED)

    def take(self) -> None:
        """READY → DONE: the blocks belong to the rank from now on."""
        self._move(Event.CLOSE)

    def fail(self, failure: Failure) -> bool:
        """End the transfer. False when it was over already."""
        if self.over:
            return False
        self._open.clear()
        self.failure = failure
        self._move(Event.FAIL)
        return True

    def _is_ours(self, ticket_id: str, generation: int, model: bytes) -> bool:
        known = hmac.compare_digest(ticket_id.encode(), self.ticket.id.encode())
        same = hmac.compare_digest(model, self._model)
        return known and same and generation == self.ticket.generation

    def _renew(self, now: float) -> None:
        self.expires_at = now + self.ticket.lease_s

    def _move(self, event: Event) -> None:
        following = RECEIVING.get((self.phase, event))
        if following is None:
            raise TransferFailed(f"a transfer that is {self.phase} cannot {event}")
        self.phase = following


class Outgoing:
    """The sender's half: which pieces are due, and when the lease wants renewing."""

    def __init__(self, ticket: Ticket, *, prompt_tokens: int, now: float) -> None:
        """Raises TransferFailed when the ticket asks for blocks that the prompt does not have."""
        needed = -(-(prompt_tokens - 1) // BLOCK_TOKENS)
        for endpoint in ticket.endpoints:
            if any(not 0 <= index < needed for index in endpoint.blocks):
                raise TransferFailed("the ticket asks for blocks past the end of the prompt")
        self.ticket = ticket
        self.phase = SendPhase.OFFERED
        self.failure: Failure | None = None
        self.sent_bytes = 0
        self._last_word_at = now
        self._waiting = sorted(
            (key for endpoint in ticket.endpoints for key in endpoint.pieces()),
            key=lambda key: (key.block, key.rank, key.group),
        )
        self._sizes = {(e.rank, e.group): e.block_bytes for e in ticket.endpoints}

    @property
    def over(self) -> bool:
        return self.phase in (SendPhase.DONE, SendPhase.FAILED)

    @property
    def left(self) -> int:
        """Pieces that have not been given out by `due`."""
        return len(self._waiting)

    def opened(self, *, now: float) -> None:
        self._move(Event.OPEN)
        self._last_word_at = now

    def due(self, ready_tokens: int, *, complete: bool) -> list[PieceKey]:
        """Pieces that can be sent now that the prompt's first `ready_tokens` are computed; each is
        given out once. A block that is not full counts only when the prompt is complete."""
        if self.phase is not SendPhase.SENDING:
            return []
        whole = ready_tokens // BLOCK_TOKENS
        count = len(self._waiting)
        if not complete:
            count = sum(1 for key in self._waiting if key.block < whole)
        due, self._waiting = self._waiting[:count], self._waiting[count:]
        return due

    def sent(self, keys: Iterable[PieceKey], *, now: float) -> None:
        self.sent_bytes += sum(self._sizes[key.rank, key.group] for key in keys)
        self._last_word_at = now

    def renewed(self, *, now: float) -> None:
        self._last_word_at = now

    def renew_in(self, now: float) -> float:
        """Seconds until the receiver must hear from us; 0 when that is overdue."""
        return max(0.0, self._last_word_at + self.ticket.lease_s / RENEWALS_PER_LEASE - now)

    def ended(self) -> None:
        """Everything is on its way. Raises TransferFailed when pieces are left."""
        if self._waiting:
            raise TransferFailed(f"{len(self._waiting)} blocks were never sent")
        self._move(Event.COMPLETE)

    def acknowledged(self) -> None:
        self._move(Event.CLOSE)

    def fail(self, failure: Failure) -> bool:
        """End the transfer. False when it was over already."""
        if self.over:
            return False
        self.failure = failure
        self._waiting = []
        self._move(Event.FAIL)
        return True

    def _move(self, event: Event) -> None:
        following = SENDING.get((self.phase, event))
        if following is None:
            raise TransferFailed(f"a transfer that is {self.phase} cannot {event}")
        self.phase = following
