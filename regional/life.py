"""One request from its arrival to its last frame: read, wait for a place, follow the attempt.

Runs in the task of the HTTP handler, so that a client that goes away cancels it like any await;
the `finally` of each attempt then tells the nodes and gives their work back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace

from core.errors import NoCapacity, RegionUnavailable, RequestError, VersionSkew
from core.events import Accepted, Done, Fault, Moved, encode_frame, event_decoder
from core.metrics import RouterMetrics
from core.types import GenerateRequest
from regional.attempt import Again, Attempt, Failure, Send, Side, after
from regional.dispatch import Dispatcher, Placed, Seat
from regional.pb import node_pb2 as pb
from regional.placement import Ask
from regional.reading import Reader, Reading
from regional.rpc import NodeSession

Write = Callable[[bytes], Awaitable[None]]
Body = pb.Reserved | pb.PrefillDone | pb.Failed | pb.SequenceOutput


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
        read: Callable[[GenerateRequest, Reading, Placed], None],
    ) -> None:
        self.request = request
        self.closing: Done | Fault | None = None
        """The end that the decode node wrote, as far as it has."""
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
            self._inbox.put_nowait(_Said(side, body))

    def lost(self, session: NodeSession) -> None:
        """The node's session is over."""
        side = self._side(session)
        if side is not None:
            self._inbox.put_nowait(_Gone(side))

    async def _answer(self) -> None:
        reading = self._reading = await self._reader.read(self.request)
        ask = Ask(
            model=reading.request.model,
            prompt_tokens=len(reading.token_ids),
            max_tokens=reading.request.sampling.max_tokens,
            choices=reading.request.sampling.n,
        )
        self._metrics.prompt_tokens.labels("all").inc(ask.prompt_tokens)
        failed: RequestError | None = None
        tries = 0
        while True:
            placed = await self._place(ask, reading, failed)
            attempt = Attempt(
                f"{self.request.id}.{self._number()}",
                placed.placement,
                reading.request,
                reading.token_ids,
            )
            failure = await self._follow(attempt, placed)
            if failure is None:
                return
            failed = failure.error
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
                again=failed is not None,
                wait=not self.request.reject_if_busy,
            )
        except RegionUnavailable:
            if failed is not None:
                raise failed from None  # nobody is left to try: say what went wrong first
            raise

    async def _follow(self, attempt: Attempt, placed: Placed) -> Failure | None:
        """Play one attempt to its end. Whatever ends it, nothing of it is left on any node."""
        self._placed, self._inbox = placed, asyncio.Queue()
        self._attempts[attempt.id] = self
        reason = "failed"
        try:
            for side, seat in _seats(placed):
                if seat.session.ended:  # between being placed and being heard
                    return attempt.gone(side)
            queued_s = time.monotonic() - self._began
            self._count(placed, queued_s)
            _send(placed, attempt.begin(deadline_s=self._left_s(), queued_s=queued_s))
            failure = await self._pass_on(attempt, placed)
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
        out = self._announce(attempt)
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
            case _Gone(side):
                return attempt.gone(side)
            case _Said(side, pb.Failed() as body):
                return attempt.failed(side, body)
            case _Said(Side.DECODE, pb.Reserved() as body):
                _send(placed, attempt.reserved(body, deadline_s=self._left_s()))
                out.append(self._announce(attempt))
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

    def _announce(self, attempt: Attempt) -> bytes:
        """Accepted, once Start is out; Moved when there was an Accepted before."""
        if not attempt.accepted:
            return b""
        placement = attempt.placement
        prefill = placement.prefill.node if placement.prefill else None
        if self._accepted:
            return encode_frame(
                Moved(prefill=prefill, decode=placement.decode.node, reason=placement.reason)
            )
        self._accepted = True
        return encode_frame(
            Accepted(
                prefill=prefill,
                decode=placement.decode.node,
                prompt_tokens=attempt.prompt_tokens,
                reason=placement.reason,
            )
        )

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
        return next(sides, None)

    def _left_s(self) -> float:
        return max(0.0, self._began + self._deadline_s - time.monotonic())

    def _count(self, placed: Placed, queued_s: float) -> None:
        placement, metrics = placed.placement, self._metrics
        metrics.placements.labels(placement.reason.value).inc()
        metrics.queue_seconds.observe(queued_s)
        metrics.prompt_tokens.labels("reusable").inc(placed.reusable_tokens)
        metrics.prompt_tokens.labels("routed").inc(placement.cached_tokens)


def _seats(placed: Placed) -> Iterator[tuple[Side, Seat]]:
    if placed.prefill is not None:
        yield Side.PREFILL, placed.prefill
    yield Side.DECODE, placed.decode


def _send(placed: Placed, messages: list[Send]) -> None:
    for one in messages:
        seat = placed.prefill if one.to is Side.PREFILL else placed.decode
        if seat is not None:
            seat.session.send(one.message)


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
