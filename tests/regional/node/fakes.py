"""A front with neighbours of the test's own: a rank, a text whose tokens are bytes, a desk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from core.engine.plan import Scores
from core.events import TokenLogprob
from core.kv.shards import PoolMemory
from core.kv.ticket import model_digest
from core.kv.transports.base import BlockMemory, Carrier, Landing
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.telemetry import SILENT, Telemetry
from core.types import FinishReason, GenerateRequest
from regional.node.answer import Calls
from regional.node.front import Front
from regional.node.pool import Pool
from regional.node.receiving import Host, OwnHost, Receiving
from regional.node.seams import Sending
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import WAIT_S, Desk
from tests.regional.node.fake_rank import END, GEOMETRY, FakeRank

VOCAB = 300
CONTEXT = 4096


@dataclass(frozen=True)
class FakeWritten:
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


class FakeWriter:
    """Holds text back while a character or a stop string could still become complete."""

    def __init__(self, stops: tuple[str, ...], end_ids: frozenset[int]) -> None:
        self._stops = stops
        self._end_ids = end_ids
        self._data = b""
        self._sent = 0
        self._tokens = 0

    def push(
        self,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        scores: Sequence[Scores] = (),
    ) -> FakeWritten:
        out = self._push(token_ids, finish)
        entries = [
            TokenLogprob(token=str(token), utf8=b"", logprob=one.logprob)
            for token, one in zip(token_ids, scores, strict=False)
        ]
        return replace(out, logprobs=tuple(entries))

    def _push(self, token_ids: Sequence[int], finish: FinishReason | None) -> FakeWritten:
        taken: list[int] = []
        for token in token_ids:
            taken.append(token)
            if token == 299:
                raise RuntimeError("a fault of the writer")
            if token < 256:
                self._data += bytes([token])
            text = self._data.decode(errors="ignore")
            found = [text.index(stop) for stop in self._stops if stop in text]
            if found:
                return self._out(taken, text[: min(found)], FinishReason.STOP)
        if finish is not None:
            return self._out(taken, self._data.decode(errors="replace"), finish)
        text = self._data.decode(errors="ignore")
        held = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        return self._out(taken, text[: len(text) - held], None)

    def _out(self, taken: list[int], text: str, finish: FinishReason | None) -> FakeWritten:
        fresh, self._sent = text[self._sent :], max(self._sent, len(text))
        self._tokens += len(taken)
        return FakeWritten(fresh, tuple(taken), finish, self._tokens)


class FakeText:
    end_ids = frozenset({END})

    def writer(
        self, stops: tuple[str, ...], end_ids: frozenset[int], *, min_tokens: int = 0
    ) -> FakeWriter:
        return FakeWriter(stops, end_ids)

    def calls(self, request: GenerateRequest, choice: int) -> Calls | None:
        return None


@dataclass
class FakeNode:
    front: Front
    rank: FakeRank
    landing: Landing
    desk: Desk

    def say(self, message: pb.RouterMessage) -> None:
        self.front.handle(message, self.desk)

    @property
    def empty(self) -> bool:
        """Nothing is held by front or rank."""
        return self.front.idle.is_set() and self.rank.held == 0

    async def until_empty(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while not self.empty:
                await asyncio.sleep(0)


@asynccontextmanager
async def fake_node(
    *,
    lease_s: float = 30.0,
    carrier: Carrier | None = None,
    clock: Callable[[], float] = time.monotonic,
    model: bytes = b"model",
    elsewhere: Sequence[Host] = (),
    telemetry: Telemetry = SILENT,
) -> AsyncIterator[FakeNode]:
    """A front with its rank, a real data socket and one open session. `elsewhere`: further hosts
    of its pool."""
    memory = bytearray(GEOMETRY.pool_bytes)
    view = PoolMemory({0: BlockMemory(GEOMETRY, memory)})
    rank = FakeRank(memory)
    landing = TcpLanding.listen("127.0.0.1", clock)
    desk = Desk()
    digest = model_digest(model)
    try:
        async with asyncio.TaskGroup() as tasks:
            front = Front(
                context=CONTEXT,
                vocab_size=VOCAB,
                text=FakeText(),
                pools=[
                    Pool(
                        0,
                        rank,
                        Sending(rank, view, carrier or TcpCarrier(), digest, clock),
                        Receiving([OwnHost(view, landing, digest, clock), *elsewhere], lease_s),
                    )
                ],
                clock=clock,
                tasks=tasks,
                name="n1",
                telemetry=telemetry,
            )
            rank.receive = partial(front.rank_said, 0)
            front.session_opened(desk)
            yield FakeNode(front, rank, landing, desk)
            front.session_closed(desk)
    finally:
        landing.close()
