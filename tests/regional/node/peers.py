"""One end of a transfer as a process of its own, which a test may stop and wake.

`python -m tests.regional.node.peers source|receiver KIND` obeys lines on stdin and answers each
with a line of JSON.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.handoff import Incoming, Refusal
from core.kv.memory import allocate
from core.kv.shards import PoolMemory
from core.kv.ticket import PieceKey, Ticket, model_digest, new_ticket_id
from core.kv.transports.base import BlockMemory, Shipment
from core.kv.transports.ways import Ways
from regional.node.receiving import OwnHost, OwnShare

BLOCKS = 24
GROUP = KVGroup(name="full", layers=1, kv_heads=1, head_dim=16384, dtype="uint8")
GEOMETRY = KVGeometry(groups=(GROUP,), blocks=(BLOCKS,))
MODEL = model_digest(b"model")
REUSED = 0xEE


def content(block: int) -> bytes:
    return bytes([block + 1]) * GROUP.block_bytes


def pool() -> PoolMemory:
    descriptor, memory = allocate(GEOMETRY.pool_bytes)
    return PoolMemory({0: BlockMemory(GEOMETRY, memory, descriptor)})


def reuse(memory: PoolMemory) -> None:
    """What a rank does with blocks that it was given back."""
    memory.ranks[0].view[:] = bytes([REUSED]) * GEOMETRY.pool_bytes


class Source:
    """Holds `content` and sends it as it is told to."""

    def __init__(self, kind: str) -> None:
        self._memory = pool()
        for block in range(BLOCKS):
            self._memory.block(0, 0, block)[:] = content(block)
        self._ways = Ways("127.0.0.1", (kind,), clock=time.monotonic)
        self._carrier = self._ways.carrier(self._memory)
        self._ticket: Ticket | None = None
        self._shipment: Shipment | None = None

    async def obey(self, verb: str, rest: str) -> str:
        try:
            await self._obey(verb, rest)
        except TransferFailed as error:
            return str(error)
        return ""

    async def _obey(self, verb: str, rest: str) -> None:
        if verb == "up":
            return
        if verb == "open":
            self._ticket = msgspec.json.decode(rest, type=Ticket)
            self._shipment = await self._carrier.open(self._ticket, MODEL, lambda _: None)
            return
        assert self._ticket is not None
        assert self._shipment is not None
        if verb == "send":
            first, end = map(int, rest.split())
            runs = self._memory.runs_for(self._ticket.endpoints[0])
            keys = [PieceKey(0, 0, block) for block in range(first, end)]
            await self._shipment.send([self._memory.piece(key, key.block, runs) for key in keys])
        elif verb == "finish":
            await self._shipment.finish(1)
        elif verb == "close":  # as an errand does before it tells the rank
            await self._shipment.close()
            reuse(self._memory)


class Receiver:
    """Awaits one transfer of all blocks. Stops itself as piece `stop_at` begins."""

    def __init__(self, kind: str) -> None:
        self._memory = pool()
        self._ways = Ways("127.0.0.1", (kind,), clock=time.monotonic)
        self._host = OwnHost(self._memory, self._ways.landing, MODEL, time.monotonic)
        self._over = asyncio.Event()
        self._share: OwnShare | None = None

    async def obey(self, verb: str, rest: str) -> object:
        if verb == "up":
            return ""
        if verb == "expect":
            lease_s, stop_at = rest.split()
            return self._expect(float(lease_s), int(stop_at))
        await self._over.wait()
        assert self._share is not None
        right = [bytes(self._memory.block(0, 0, n)) == content(n) for n in range(BLOCKS)]
        verified = self._share.first_missing
        return {
            "ready": self._share.ready,
            "failure": self._share.failure,
            "wrong": [n for n, good in enumerate(right[:verified]) if not good],
            "verified": BLOCKS if verified is None else verified,
        }

    def _expect(self, lease_s: float, stop_at: int) -> Ticket:
        fill = ({n: n for n in range(BLOCKS)},)
        ticket = Ticket(new_ticket_id(), 1, lease_s, tuple(self._host.endpoints(fill)))
        begin = Incoming.begin

        def stop_then_begin(
            self: Incoming, key: PieceKey, size: int, *, now: float
        ) -> Refusal | None:
            answer = begin(self, key, size, now=now)
            if key.block == stop_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            return answer

        Incoming.begin = stop_then_begin  # type: ignore[method-assign] # so the test can wait for it
        self._share = self._host.reserve(ticket, fill, self._over.set)
        return ticket


async def serve(role: str, kind: str) -> None:
    end = Source(kind) if role == "source" else Receiver(kind)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        verb, _, rest = line.decode().strip().partition(" ")
        sys.stdout.buffer.write(msgspec.json.encode(await end.obey(verb, rest)) + b"\n")
        sys.stdout.buffer.flush()


class Peer:
    """The process, as a test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def hear(self) -> Any:  # JSON
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            line = await self.process.stdout.readline()
        assert line, "the peer has ended"
        return msgspec.json.decode(line)

    async def ask(self, line: str) -> Any:  # JSON
        self.say(line)
        return await self.hear()


@asynccontextmanager
async def peer(role: str, kind: str) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.regional.node.peers", role, kind,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        running = Peer(process)
        assert await running.ask("up") == ""
        yield running
    finally:
        process.kill()
        await process.communicate()


def impatient(ticket: Ticket, lease_s: float) -> str:
    """The ticket in JSON, for a source that gives up after `lease_s`."""
    return msgspec.json.encode(replace(ticket, lease_s=lease_s)).decode()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
