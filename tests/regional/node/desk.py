"""A router's desk: what it says to a node, and what the node has said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from core.events import Delta, Done, Event, Fault, Finish, event_decoder
from core.types import (
    FinishReason,
    GenerateRequest,
    ModelName,
    RequestId,
    ResumePoint,
    Sampling,
)
from regional.pb import node_pb2 as pb

WAIT_S = 30.0


@dataclass
class Desk:
    """What a node has said over one session."""

    messages: list[pb.NodeMessage] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: pb.NodeMessage) -> None:
        self.messages.append(message)
        self._news.set()

    def of(self, kind: str) -> list[pb.NodeMessage]:
        return [one for one in self.messages if one.WhichOneof("body") == kind]

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                self._news.clear()
                await self._news.wait()

    async def reserved(self, attempt_id: str) -> pb.Reserved:
        def found() -> list[pb.Reserved]:
            given = [one.reserved for one in self.of("reserved")]
            return [one for one in given if one.attempt_id == attempt_id]

        await self.until(lambda: bool(found()))
        return found()[0]

    async def failed(self, attempt_id: str) -> pb.Failed:
        def found() -> list[pb.Failed]:
            given = [one.failed for one in self.of("failed")]
            return [one for one in given if one.attempt_id == attempt_id]

        await self.until(lambda: bool(found()))
        return found()[0]

    async def prefill_done(self) -> pb.PrefillDone:
        await self.until(lambda: bool(self.of("prefill_done")))
        return self.of("prefill_done")[0].prefill_done

    def outputs(self, attempt_id: str) -> list[pb.SequenceOutput]:
        return [
            output
            for message in self.of("step_output")
            for output in message.step_output.sequences
            if output.attempt_id == attempt_id
        ]

    def events(self, attempt_id: str) -> list[Event]:
        decoder = event_decoder()
        return [
            event for output in self.outputs(attempt_id) for event in decoder.feed(output.frames)
        ]

    async def ended(self, attempt_id: str) -> list[Event]:
        await self.until(lambda: any(one.last for one in self.outputs(attempt_id)))
        return self.events(attempt_id)


def answer_text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def answer_ids(events: Sequence[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def finish_of(events: Sequence[Event]) -> FinishReason:
    (finish,) = (event.reason for event in events if isinstance(event, Finish))
    return finish


def done_of(events: Sequence[Event]) -> Done:
    last = events[-1]
    assert isinstance(last, Done)
    return last


def fault_of(events: Sequence[Event]) -> Fault:
    last = events[-1]
    assert isinstance(last, Fault)
    return last


def work(
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    *,
    deadline_s: float = 60.0,
    resume: tuple[int, ...] = (),
    chars_sent: int = 0,
    spent: pb.Spent | None = None,
    move: int = 0,
    trace: str = "",
) -> pb.Work:
    point = ResumePoint(choice=0, token_ids=resume, chars_sent=chars_sent)
    request = GenerateRequest(
        id=RequestId("r"),
        model=ModelName("m"),
        sampling=sampling or Sampling(),
        seed=1,
        rendered_at=0,
        resume=(point,) if resume else (),
        trace=trace,
    )
    return pb.Work(
        request=msgspec.msgpack.encode(request),
        token_ids=prompt,
        deadline_s=deadline_s,
        spent=spent,
        move_min_tokens=move,
    )


def start(
    attempt_id: str, given: pb.Work | None = None, *, queued_s: float = 0.0
) -> pb.RouterMessage:
    message = pb.Start(attempt_id=attempt_id, queued_s=queued_s)
    if given is not None:
        message.work.CopyFrom(given)
    return pb.RouterMessage(start=message)


def reserve(attempt_id: str, given: pb.Work) -> pb.RouterMessage:
    return pb.RouterMessage(reserve=pb.Reserve(attempt_id=attempt_id, work=given))


def prefill(attempt_id: str, given: pb.Work, ticket: pb.Ticket) -> pb.RouterMessage:
    return pb.RouterMessage(prefill=pb.Prefill(attempt_id=attempt_id, work=given, ticket=ticket))


def abort(attempt_id: str, reason: str = "client_gone") -> pb.RouterMessage:
    return pb.RouterMessage(abort=pb.Abort(attempt_id=attempt_id, reason=reason))
