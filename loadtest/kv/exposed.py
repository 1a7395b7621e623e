"""How much of a hand-off nobody waits for, over a link that takes half as long as the prompt.

Two fronts of this process, each with a rank process of its own; this module is their router. The
link is a token bucket before each block, set so that all KV takes half of the time in which the
prompt is computed. *Exposed* is the time from the last computed chunk to the moment at which the
decode node's rank is told to begin.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.engine.messages import (
    Begin,
    Command,
    PrefillProgress,
    RankConfig,
    RankMessage,
    ScriptedConfig,
    Stepped,
)
from core.errors import TransferFailed
from core.kv.shards import PoolMemory
from core.kv.ticket import Ticket, model_digest
from core.kv.transports.base import BlockMemory, Carrier, Piece, Shipment
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.text.model import TextModel, load_text
from core.types import GenerateRequest, ModelName, RequestId, Sampling
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from regional.node.front import Front
from regional.node.pool import Pool
from regional.node.rank_link import RankLink
from regional.node.receiving import OwnHost, Receiving
from regional.node.seams import Sending
from regional.pb import node_pb2 as pb

PROMPT_TOKENS = 4096
LINK_SHARE = 0.5
"""KV time over prefill time."""
TARGET, FLOOR = 0.20, 0.35
_STEP_TOKENS = 512
_BLOCKS = 320
_LEASE_S = 30.0
_BURST_S = 0.005
_PATIENCE_S = 120.0
PACE = ScriptedConfig(prefill_tokens_per_s=1600.0, block_bytes=64 << 10)
"""Ranks without a model, whose time a step is exact."""


@dataclass(frozen=True, slots=True)
class Handed:
    """One prompt of `bytes` of KV: seconds."""

    prefill_s: float
    exposed_s: float
    bytes: int
    link_s: float
    """What the link takes for all of it; 0 without a limit."""


class Link:
    """A token bucket of `bytes_per_s`; 0 is without a limit."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until `size` bytes have gone through."""
        if not self.bytes_per_s:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now - _BURST_S) + size / self.bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class ThrottledCarrier:
    """Blocks leave one by one, when the link has taken them."""

    def __init__(self, inner: Carrier, link: Link) -> None:
        self._inner, self._link = inner, link

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        return _Throttled(await self._inner.open(ticket, model, failed), self._link)


class _Throttled:
    def __init__(self, inner: Shipment, link: Link) -> None:
        self._inner, self._link = inner, link
        self.renew, self.finish, self.close = inner.renew, inner.finish, inner.close

    async def send(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            await self._link.take(piece.size)
            await self._inner.send([piece])


class _Watched:
    """A rank link that notes when what passes."""

    def __init__(self, link: RankLink) -> None:
        self.complete_at = self.begun_at = 0.0
        self._link = link

    def send(self, command: Command) -> None:
        if isinstance(command, Begin):
            self.begun_at = time.monotonic()
        self._link.send(command)

    def heard(self, message: RankMessage) -> None:
        progress: tuple[PrefillProgress, ...] = ()
        if isinstance(message, Stepped):
            progress = message.progress
        if any(one.complete for one in progress):
            self.complete_at = time.monotonic()


class _Desk:
    """What one node says to its router."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()

    def send(self, message: pb.NodeMessage) -> None:
        if message.WhichOneof("body") != "cache_events":
            self._said.put_nowait(message)

    async def until(self, kind: str) -> pb.NodeMessage:
        """The next message of that kind. Raises TransferFailed with what a node fails with."""
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                message = await self._said.get()
                if message.WhichOneof("body") == kind:
                    return message
                if message.HasField("failed"):
                    raise TransferFailed(f"{message.failed.stage}: {message.failed.message}")


@dataclass(frozen=True, slots=True)
class _Node:
    front: Front
    rank: _Watched
    desk: _Desk

    def say(self, message: pb.RouterMessage) -> None:
        self.front.handle(message, self.desk)


@asynccontextmanager
async def _node(config: RankConfig, text: TextModel, carrier: Carrier) -> AsyncIterator[_Node]:
    link = await RankLink.start(config)
    try:
        loaded = await link.ready()
        memory = PoolMemory({0: BlockMemory(loaded.ready.geometry, loaded.memory)})
        landing = TcpLanding.listen("127.0.0.1", time.monotonic)
        digest = model_digest(loaded.ready.fingerprint)
        rank, desk = _Watched(link), _Desk()
        sending = Sending(rank, memory, carrier, digest, time.monotonic)
        host = OwnHost(memory, landing, digest, time.monotonic)
        try:
            async with asyncio.TaskGroup() as tasks:
                front = Front(
                    context=loaded.ready.context,
                    vocab_size=min(text.vocab_size, loaded.ready.vocab_size),
                    text=text,
                    pools=[Pool(0, rank, sending, Receiving([host], _LEASE_S))],
                    clock=time.monotonic,
                    tasks=tasks,
                )

                def heard(message: RankMessage) -> None:
                    rank.heard(message)
                    front.rank_said(0, message)

                link.attach(heard)
                front.session_opened(desk)
                yield _Node(front, rank, desk)
                front.session_closed(desk)
        finally:
            landing.close()
    finally:
        await link.close()


async def hand_over(reader: _Node, writer: _Node, link: Link, number: int) -> Handed:
    """Read one prompt that nobody has seen on `reader`, answer it on `writer`."""
    name = f"r{number}.1"
    request = GenerateRequest(
        id=RequestId(name),
        model=ModelName("m"),
        sampling=Sampling(max_tokens=2, temperature=0.0),
        seed=1,
        rendered_at=0,
    )
    tokens = [300 + (17 * number + n * 31) % 30000 for n in range(PROMPT_TOKENS)]
    work = pb.Work(
        request=msgspec.msgpack.encode(request), token_ids=tokens, deadline_s=_PATIENCE_S
    )
    writer.say(pb.RouterMessage(reserve=pb.Reserve(attempt_id=name, work=work)))
    reserved = (await writer.desk.until("reserved")).reserved
    began = time.monotonic()
    prefill = pb.Prefill(attempt_id=name, work=work, ticket=reserved.ticket)
    reader.say(pb.RouterMessage(prefill=prefill))
    writer.say(pb.RouterMessage(start=pb.Start(attempt_id=name)))
    done = (await reader.desk.until("prefill_done")).prefill_done
    while not (await writer.desk.until("step_output")).step_output.sequences[0].last:
        continue
    return Handed(
        prefill_s=reader.rank.complete_at - began,
        exposed_s=writer.rank.begun_at - reader.rank.complete_at,
        bytes=done.kv_bytes,
        link_s=done.kv_bytes / link.bytes_per_s if link.bytes_per_s else 0.0,
    )


async def _measure(config: RankConfig, text: TextModel, rounds: int) -> list[Handed]:
    """`rounds` prompts over the limited link, after one without a limit that sets it."""
    link = Link()
    numbers = itertools.count(1)
    carrier = ThrottledCarrier(TcpCarrier(), link)
    async with _node(config, text, carrier) as reader, _node(config, text, carrier) as writer:
        free = await hand_over(reader, writer, link, next(numbers))
        handed: list[Handed] = []
        for _ in range(rounds):
            link.bytes_per_s = free.bytes / (LINK_SHARE * free.prefill_s)
            handed.append(await hand_over(reader, writer, link, next(numbers)))
            free = handed[-1]
        return handed


def rank_config(source: Path, scripted: ScriptedConfig | None) -> RankConfig:
    return RankConfig(
        node="bench",
        socket_fd=-1,
        engine="torch" if scripted is None else "scripted",
        source=str(source),
        kv_blocks=_BLOCKS,
        max_step_tokens=_STEP_TOKENS,
        scripted=scripted,
    )


def figures(source: Path, *, quick: bool = False) -> list[Figure]:
    """With paced ranks, whose prefill takes exactly as long each time, and with the model at
    `source`. About half a minute; `quick` measures the first alone."""
    text = load_text(source)
    paced = msgspec.structs.replace(
        PACE, skip_ids=tuple(sorted(text.control_ids)), end_id=min(text.end_ids)
    )
    plans = [("paced ranks", rank_config(source, paced), 2 if quick else 3)]
    if not quick:
        plans.append(("the bundled model", rank_config(source, None), 2))
    return [_figure(name, asyncio.run(_measure(c, text, rounds))) for name, c, rounds in plans]


def _figure(name: str, handed: Sequence[Handed]) -> Figure:
    shares = [one.exposed_s / one.link_s for one in handed]
    prefill, link = (
        median([one.prefill_s for one in handed]),
        median([one.link_s for one in handed]),
    )
    return Figure(
        f"exposed transfer time / KV time, {name}",
        median(shares),
        "",
        TARGET,
        FLOOR,
        f"{PROMPT_TOKENS:,} tokens: prefill {prefill:.2f} s, KV {link:.2f} s of link",
    )
