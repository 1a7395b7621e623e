"""A node without an engine that joins the real router, and readers of what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from core.events import Delta, Done, Event, Fault, encode_frame
from core.types import ModelName, NodeName
from regional.pb import node_pb2 as pb
from regional.rpc import (
    SESSION_METHOD,
    channel_options,
    decode_router_message,
    encode_node_message,
)  # fmt: skip

MODEL = ModelName("tiny")
PATIENCE_S = 30.0
"""How long a test waits for something that must happen."""


class FakeNode:
    """A node that joins the real router over a real stream.

    What it hears is kept in order; `got` waits for a message. `react` may answer on its own.
    """

    def __init__(
        self,
        name: str,
        role: str,
        *,
        port: int,
        secret: bytes,
        react: Callable[[FakeNode, pb.RouterMessage], None] | None = None,
    ) -> None:
        self.name = NodeName(name)
        self.join = pb.Join(
            wire=1,
            name=name,
            epoch="e1",
            role=role,
            secret=secret.decode(),
            release="test",
            max_sequences=4,
            max_step_tokens=512,
            pid=7,
            models=[
                pb.ModelOffer(
                    name=MODEL,
                    fingerprint=b"same",
                    context=4096,
                    kv_bytes_per_token=64,
                    blocks=1024,
                    prefill_tokens_per_s=1000.0,
                    decode_tokens_per_s=50.0,
                )
            ],
        )
        self.first: pb.NodeMessage | None = None
        """Said in place of Join."""
        self.heard: list[pb.RouterMessage] = []
        self.unexpected: list[str] = []
        self._react = react
        self._news = asyncio.Condition()
        self._outgoing: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options())
        self._tasks: list[asyncio.Task[None]] = []
        self.over = asyncio.Event()
        self._taken = 0
        self._beats = 0

    async def start(self) -> FakeNode:
        """Join and be welcomed."""
        await self.dial()
        await self.got("welcome")
        return self

    async def dial(self) -> None:
        dial = self._channel.stream_stream(
            SESSION_METHOD,
            request_serializer=encode_node_message,
            response_deserializer=decode_router_message,
        )
        call = dial()
        await call.write(self.first or pb.NodeMessage(join=self.join))
        self._tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
        ]

    async def _read(
        self, call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.RouterMessage]
    ) -> None:
        try:
            while isinstance(message := await call.read(), pb.RouterMessage):
                if self._react is not None:
                    self._react(self, message)
                async with self._news:
                    self.heard.append(message)
                    self._news.notify_all()
        except grpc.RpcError as error:
            self.unexpected.append(error.details() or "")
        finally:
            self.over.set()

    async def _write(
        self, call: grpc.aio.StreamStreamCall[pb.NodeMessage, pb.RouterMessage]
    ) -> None:
        while not self.over.is_set():
            await call.write(await self._outgoing.get())

    async def die(self) -> None:
        """Go without a word, like a killed process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
        self.over.set()

    async def got(self, kind: str) -> pb.RouterMessage:
        """The next unread message, which must be of `kind`."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(self.heard) > self._taken)
        message = self.heard[self._taken]
        self._taken += 1
        assert message.WhichOneof("body") == kind, message
        return message

    async def next(self, count: int) -> list[pb.RouterMessage]:
        """The next `count` unread messages, whatever they are."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(self.heard) >= self._taken + count)
        self._taken += count
        return self.heard[self._taken - count : self._taken]

    def unread(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.heard[self._taken :]]

    def say(self, message: pb.NodeMessage) -> None:
        self._outgoing.put_nowait(message)

    def beat(
        self,
        *,
        running: int = 0,
        blocks_used: int = 0,
        generated_tokens: int = 0,
        draining: bool = False,
    ) -> None:
        self._beats += 1
        beat = pb.Heartbeat(
            sequence=self._beats,
            running=running,
            blocks_used=blocks_used,
            generated_tokens=generated_tokens,
            draining=draining,
        )
        self.say(pb.NodeMessage(heartbeat=beat))

    def reserved(self, attempt_id: str, cached: int = 0) -> None:
        ticket = pb.Ticket(id=f"ticket {attempt_id}", generation=1, lease_s=30.0)
        said = pb.Reserved(attempt_id=attempt_id, ticket=ticket, cached_tokens=cached)
        self.say(pb.NodeMessage(reserved=said))

    def prefill_done(self, attempt_id: str) -> None:
        self.say(pb.NodeMessage(prefill_done=pb.PrefillDone(attempt_id=attempt_id, kv_bytes=5)))

    def failed(
        self, attempt_id: str, stage: str, code: str = "internal_error", *, retryable: bool = True
    ) -> None:
        failed = pb.Failed(
            attempt_id=attempt_id, stage=stage, code=code, message="scripted", retryable=retryable
        )
        self.say(pb.NodeMessage(failed=failed))

    def preempted(self, attempt_id: str, token_ids: bytes, chars_sent: int, computed: int) -> None:
        spent = pb.Spent(prompt_read=True, computed_tokens=computed, decode_s=2.5)
        self.say(
            pb.NodeMessage(
                preempted=pb.Preempted(
                    attempt_id=attempt_id, token_ids=token_ids, chars_sent=chars_sent, spent=spent
                )
            )
        )

    def output(self, attempt_id: str, *events: Event) -> None:
        """One step's output for one sequence."""
        sequence = pb.SequenceOutput(
            attempt_id=attempt_id,
            frames=b"".join(encode_frame(event) for event in events),
            delta=any(isinstance(event, Delta) for event in events),
            last=any(isinstance(event, Done | Fault) for event in events),
        )
        self.say(pb.NodeMessage(step_output=pb.StepOutput(sequences=[sequence])))

    def cache(
        self,
        sequence: int,
        *,
        snapshot: bool = False,
        stored: bytes = b"",
        evicted: bytes = b"",
        pool: int = 0,
    ) -> None:
        events = pb.CacheEvents(
            sequence=sequence, snapshot=snapshot, stored=stored, evicted=evicted, pool=pool
        )
        self.say(pb.NodeMessage(cache_events=events))


def work_of(message: pb.RouterMessage) -> pb.Work:
    body = getattr(message, message.WhichOneof("body") or "")
    work: pb.Work = body.work
    return work


def attempt_of(message: pb.RouterMessage) -> str:
    body = getattr(message, message.WhichOneof("body") or "")
    attempt_id: str = body.attempt_id
    return attempt_id
