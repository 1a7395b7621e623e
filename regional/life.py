"""One request from its arrival to its last frame: read, wait for a place, follow the attempt.

Runs in the task of the HTTP handler, so that a client that goes away cancels it like any await;
the `finally` of each attempt then tells the nodes and gives their work back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace

import msgspec

from core.errors import NoCapacity, RegionUnavailable, RequestError, VersionSkew
from core.events import Done, Fault, event_decoder
from core.metrics import RouterMetrics
from core.types import GenerateRequest, ModelName
from regional.announce import announcement
from regional.attempt import MAX_MOVES, Again, Attempt, Failure, Send, Side, after
from regional.dispatch import Dispatcher, Placed, Seat
from regional.pb import node_pb2 as pb
from regional.placement import Ask
from regional.reading import Reader, Reading
from regional.record import PREEMPTED, Record
from regional.rpc import NodeSession

Write = Callable[[bytes], Awaitable[None]]
Body = (
    pb.Reserved
    | pb.PrefillDone
    | pb.Pulling
    | pb.Sent
    | pb.Failed
    | pb.Preempted
    | pb.SequenceOutput
)


@dataclass(frozen=True, slots=True)
class _Said:
    side: Side
    body: Body


@dataclass(frozen=True, slots=True)
class _Gone:
    side: Side


class Life:
    """`attempts` is the router's table of whom to tell about which attempt; `read` is called when
    a prompt has been read, with the request as it came."""

    def __init__(
        self,
        request: GenerateRequest,
        write: Write,
        *,
        age: int,
        deadline_s: float,
        reader: Reader,
        dispatcher: Dispatcher,
        attempts: MutableMapping[str, Life],
        number: Callable[[], int],
        metrics: RouterMetrics,
        record: Record,
        read: Callable[[GenerateRequest, Reading, Placed], None],
    ) -> None:
        self.request = request
        self.record = record
        self.closing: Done | Fault | None = None
        """The end that the decode node wrote, as far as it has."""
        self.placed: Placed | None = None
        """The place where its prompt was read last, before any of the answer."""
        self._write = write
        self._age = age
        self._reader = reader
        self._dispatcher = dispatcher
        self._attempts = attempts
        self._number = number
        self._metrics = metrics
        self._read = read
        self._began = time.monotonic()
        self._deadline_s = deadline_s
        self._scope = asyncio.timeout(deadline_s)
        self._running = False
        self._stopped: RequestError | None = None
        self._accepted = False
        self._moves = 0
        """Times that the answer was pushed out of memory in the middle."""
        self._served_s = 0.0
        """Spent on nodes that lost it so."""
        self._placed: Placed | None = None
        self._reading: Reading | None = None
        self._inbox: asyncio.Queue[_Said | _Gone] = asyncio.Queue()

    async def run(self) -> None:
        """Write the whole stream. Raises the RequestError that is to end it when the decode node
        did not end it itself; TimeoutError when the deadline passed."""
        try:
            async with self._scope:
                self._running = True
                await self._answer()
        except TimeoutError:
            if self._stopped is not None:
                raise self._stopped from None
            raise
        finally:
            self._running = False

    def stop(self, error: RequestError) -> None:
        """End the request with `error` at its next await: a stop is a deadline that is now."""
        if self._running and self._stopped is None:
            self._stopped = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    def hear(self, session: NodeSession, body: Body) -> None:
        """A node said something about the present attempt."""
        side = self._side(session)
        if side is not None:
            self._inbox.put_nowait(_Said(Side.SOURCE if _of_source(body) else side, body))

    def lost(self, session: NodeSession) -> None:
        """The node's session is over."""
        side = self._side(session)
        if side is not None:
            self._inbox.put_nowait(_Gone(side))

    async def _answer(self) -> None:
        reading = self._reading = await self._reader.read(self.request)
        self.record.was_read(len(reading.token_ids))
        ask = _ask(reading)
        spent: pb.Spent | None = None
        failed: RequestError | None = None
        tries = 0
        while True:
            placed = await self._place(ask, reading, failed)
            attempt_id = f"{self.request.id}.{self._number()}"
            trace = self.record.placed(attempt_id, placed)
            attempt = Attempt(
                attempt_id,
                placed.placement,
                msgspec.structs.replace(reading.request, trace=trace),
                reading.token_ids,
                move_min_tokens=self._move_min_tokens(ask.model),
                spent=spent,
            )
            failure = await self._follow(attempt, placed)
            if attempt.left is not None:
                left, self._moves = attempt.left, self._moves + 1
                self.record.ended(PREEMPTED)
                self._metrics.replacements.labels("preempted").inc()
                spent = left.spent
                reading = self._reading = reading.continued(left.token_ids, left.chars_sent)
                ask = _onward(_ask(reading), ask, placed)
                continue
            if failure is None:
                return
            failed = failure.error
            self.record.ended(failed.code)
            tries += not isinstance(failed, NoCapacity)
            decision = after(failure, visible=attempt.visible, tries=tries)
            if isinstance(decision, RequestError):
                raise decision
            self._metrics.replacements.labels(failed.code).inc()
            ask = _again(ask, decision, placed)

    async def _place(self, ask: Ask, reading: Reading, failed: RequestError | None) -> Placed:
        try:
            return await self._dispatcher.place(
                ask,
                reading,
                age=self._age,
                priority=self.request.priority,
                again=failed is not None or self._moves > 0,
                wait=not self.request.reject_if_busy,
            )
        except RegionUnavailable:
            if failed is not None:
                raise failed from None  # nobody is left to try: say what went wrong first
            raise

    def _move_min_tokens(self, model: ModelName) -> int:
        """See pb.Work."""
        return self._dispatcher.move_min_tokens(model) if self._moves < MAX_MOVES else 0

    async def _follow(self, attempt: Attempt, placed: Placed) -> Failure | None:
        """Play one attempt to its end. Whatever ends it, nothing of it is left on any node."""
        self._placed, self._inbox = placed, asyncio.Queue()
        self._attempts[attempt.id] = self
        reason = "failed"
        try:
            for side, seat in _seats(placed):
                if seat.session.ended:  # between being placed and being heard
                    return attempt.gone(side)
            if placed.source is not None and placed.source.session.ended:
                attempt.source_over()
            began = time.monotonic()
            queued_s = began - self._began - self._served_s
            self._count(placed, queued_s)
            _send(placed, attempt.begin(deadline_s=self._left_s(), queued_s=queued_s))
            failure = await self._pass_on(attempt, placed)
            if attempt.left is not None:
                self._served_s += time.monotonic() - began
            reason = "failed" if attempt.visible else "moved"
            return failure
        except asyncio.CancelledError:
            timed_out = self._scope.expired() and self._stopped is None
            reason = "deadline" if timed_out else "client_gone"
            raise
        finally:
            del self._attempts[attempt.id]
            self._placed = None
            _send(placed, attempt.abort(reason))
            placed.release()
            self._dispatcher.poke()

    async def _pass_on(self, attempt: Attempt, placed: Placed) -> Failure | None:
        """Feed the attempt and write what it lets out, all that is there in one write."""
        failure: Failure | None = None
        out = self._announce(attempt, placed)
        while True:
            if out:
                await self._write(out)
            if attempt.over:
                return failure
            pieces: list[bytes] = []
            for event in await self._events():
                if not attempt.over:
                    failure = self._take(event, attempt, placed, pieces)
            out = b"".join(pieces)

    def _take(
        self, event: _Said | _Gone, attempt: Attempt, placed: Placed, out: list[bytes]
    ) -> Failure | None:
        match event:
            case _Gone(Side.SOURCE) | _Said(Side.SOURCE, pb.Failed()):
                _send(placed, attempt.source_over())
            case _Said(Side.SOURCE, pb.Sent() as body):
                _send(placed, attempt.sent(body))
            case _Gone(side):
                return attempt.gone(side)
            case _Said(side, pb.Failed() as body):
                return attempt.failed(side, body)
            case _Said(Side.DECODE, pb.Preempted() as body):
                attempt.preempted(body)
            case _Said(Side.DECODE, pb.Reserved() as body):
                _send(placed, attempt.reserved(body, deadline_s=self._left_s()))
                out.append(self._announce(attempt, placed))
            case _Said(_, pb.Pulling() as body):
                _send(placed, attempt.pulling(body, deadline_s=self._left_s()))
            case _Said(Side.PREFILL, pb.PrefillDone()):
                attempt.prefill_done()
                self._prompt_read(placed)
            case _Said(Side.DECODE, pb.SequenceOutput() as body):
                self._output(body, attempt, placed)
                out.append(body.frames)
        return None

    def _output(self, body: pb.SequenceOutput, attempt: Attempt, placed: Placed) -> None:
        if body.delta and not attempt.visible:
            self._prompt_read(placed)
            self.record.first()
        attempt.output(body)
        if body.delta:
            placed.decode.charge.generated()
        if body.last:
            self.closing = _closing(body.frames)

    def _prompt_read(self, placed: Placed) -> None:
        for _, seat in _seats(placed):
            seat.charge.prompt_read()
        if self._reading is not None:
            self._read(self.request, self._reading, placed)
        self._dispatcher.poke()

    def _announce(self, attempt: Attempt, placed: Placed) -> bytes:
        """Accepted, once Start is out; Moved when there was an Accepted before."""
        if not attempt.accepted:
            return b""
        again, self._accepted = self._accepted, True
        return announcement(placed, attempt.prompt_tokens, again=again)

    async def _events(self) -> list[_Said | _Gone]:
        """At least one; all that are there."""
        events = [await self._inbox.get()]
        while not self._inbox.empty():
            events.append(self._inbox.get_nowait())
        return events

    def _side(self, session: NodeSession) -> Side | None:
        if self._placed is None:
            return None
        sides = (side for side, seat in _seats(self._placed) if seat.session is session)
        source = self._placed.source
        is_source = source is not None and source.session is session
        return next(sides, Side.SOURCE if is_source else None)

    def _left_s(self) -> float:
        return max(0.0, self._began + self._deadline_s - time.monotonic())

    def _count(self, placed: Placed, queued_s: float) -> None:
        placement, metrics = placed.placement, self._metrics
        metrics.placements.labels(placement.reason.value).inc()
        if self._moves:
            return  # what is read anew is neither a question nor a hit once more
        metrics.queue_seconds.observe(queued_s)
        self.placed = placed


def _seats(placed: Placed) -> Iterator[tuple[Side, Seat]]:
    if placed.prefill is not None:
        yield Side.PREFILL, placed.prefill
    yield Side.DECODE, placed.decode


def _send(placed: Placed, messages: list[Send]) -> None:
    for one in messages:
        seat = {
            Side.PREFILL: placed.prefill,
            Side.DECODE: placed.decode,
            Side.SOURCE: placed.source,
        }[one.to]
        if seat is not None:
            seat.session.send(one.message)


def _of_source(body: Body) -> bool:
    """Said by a node as the source of a pull, whatever else it is in the same attempt."""
    return isinstance(body, pb.Sent) or (isinstance(body, pb.Failed) and body.stage == "send")


def _ask(reading: Reading) -> Ask:
    """What was generated already is read like a prompt."""
    sampling, written = reading.request.sampling, len(reading.output_ids)
    most = sampling.max_tokens
    return Ask(
        model=reading.request.model,
        prompt_tokens=len(reading.token_ids) + written,
        max_tokens=None if most is None else max(1, most - written),
        choices=sampling.n,
        may_pull=True,
    )


def _onward(ask: Ask, before: Ask, placed: Placed) -> Ask:
    """After a preemption: the node has no room for it until something has changed there."""
    seat = placed.decode
    key = seat.session.serial, seat.dp_rank
    refused = {**before.refused, key: seat.charge.changes}
    return replace(ask, excluded=before.excluded, refused=refused)


def _again(ask: Ask, decision: Again, placed: Placed) -> Ask:
    seat = placed.prefill if decision.side is Side.PREFILL else placed.decode
    if seat is None:
        raise LookupError(f"an attempt without a {decision.side} node failed there")
    serial = seat.session.serial
    if decision.refuse:
        key = serial, seat.dp_rank
        return replace(ask, refused={**ask.refused, key: seat.charge.changes})
    if decision.exclude:
        return replace(ask, excluded=ask.excluded | {serial})
    return replace(ask, recompute=True)


def _closing(frames: bytes) -> Done | Fault | None:
    """The end among frames that are passed on as they are: for the counters alone."""
    try:
        ends = [event for event in event_decoder().feed(frames) if isinstance(event, Done | Fault)]
    except VersionSkew:
        return None
    return ends[-1] if ends else None
