"""How fast KV goes from one process to another, beside what the machine can do.

Contestants take turns in every round, so what slows the machine down slows all of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from xxhash import xxh3_64_intdigest

from core.kv.shards import PoolMemory
from core.kv.ticket import Ticket
from core.kv.transports import mooncake
from core.kv.transports.base import SHARED_MEMORY, TCP, Carrier
from core.kv.transports.ways import Ways
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.kv import far
from loadtest.kv.far import HOST, MODEL, RAW_BYTES, Segment

BYTES = 256 << 20
MEMCPY, RAW, MOONCAKE = "one memcpy", "raw socket", "Mooncake's TCP"
_TURNS = 3
"""Of a contestant in each round; the fastest counts, for all of them."""
_READ_BYTES = 16 << 20
"""Of one call of Mooncake's: its fastest."""
_END_S = 10.0


@dataclass
class Rates:
    """GB/s by contestant, one number a round. `missing`: why a contestant did not take part."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


class WrongBytes(Exception):
    """What arrived is not what was sent: no figure of such a run counts."""


def measure(rounds: int, *, size: int = BYTES, say: Callable[[str], None]) -> Rates:
    """Raises WrongBytes."""
    blocks = size // far.GROUP.block_bytes
    with _far_end(blocks) as pipe:
        return asyncio.run(_Near(pipe, blocks).run(rounds, say))


def figures(found: Rates) -> list[Figure]:
    wanted = (
        ("shared memory, 256 MiB verified / one memcpy", SHARED_MEMORY, MEMCPY, 0.6, 0.4),
        ("TCP, 256 MiB verified / raw loopback socket", TCP, RAW, 0.8, 0.6),
        ("TCP, 256 MiB verified / Mooncake's TCP", TCP, MOONCAKE, 1.0, 0.8),
    )
    return [
        _ratio(name, found.rates, ours, rival, target, floor)
        for name, ours, rival, target, floor in wanted
        if rival in found.rates
    ]


def _ratio(
    name: str,
    rates: Mapping[str, list[float]],
    ours: str,
    rival: str,
    target: float,
    floor: float,
) -> Figure:
    pairs = zip(rates[ours], rates[rival], strict=True)
    about = f"{median(rates[ours]):.2f} against {median(rates[rival]):.2f} GB/s"
    return Figure(name, median([mine / other for mine, other in pairs]), "×", target, floor, about)


@contextmanager
def _far_end(blocks: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=far.run, args=(theirs, blocks), daemon=True)
    process.start()
    try:
        yield pipe
        pipe.send("end")
        process.join(_END_S)
    finally:
        process.kill()
        process.join()


class _Near:
    """The source of our transfers and of the raw ones; the reader of Mooncake's."""

    def __init__(self, pipe: Connection, blocks: int) -> None:
        self._pipe = pipe
        self._memory = far.memory(blocks)
        self._pool = PoolMemory({0: self._memory})
        self._view = self._memory.view
        self._size = len(self._view)
        self._view[:] = (os.urandom(1 << 20) * (self._size // (1 << 20) + 1))[: self._size]
        self._digest = xxh3_64_intdigest(self._view)
        self._copy = memoryview(bytearray(self._size))
        self._engine: Any = None  # the package has no types

    async def run(self, rounds: int, say: Callable[[str], None]) -> Rates:
        found = Rates()
        with _carriers(self._pool) as carriers:
            contestants: dict[str, Callable[[], Coroutine[Any, Any, float | str]]] = {
                MEMCPY: self._memcpy,
                SHARED_MEMORY: lambda: self._hand_over(SHARED_MEMORY, carriers[SHARED_MEMORY]),
                RAW: self._raw,
                TCP: lambda: self._hand_over(TCP, carriers[TCP]),
                MOONCAKE: self._mooncake,
            }
            for number in range(rounds + 1):  # the first one warms up: pages, mappings, buffers
                for name, contestant in contestants.items():
                    times = [await contestant() for _ in range(_TURNS)]
                    why = next((one for one in times if isinstance(one, str)), None)
                    if why is not None:
                        found.missing[name] = why
                    elif number:
                        best = min(one for one in times if isinstance(one, float))
                        found.rates.setdefault(name, []).append(self._size / best / 1e9)
                if number:
                    said = ", ".join(f"{n} {r[-1]:.2f}" for n, r in found.rates.items())
                    say(f"  round {number} of {rounds}, GB/s: {said}")
        return found

    async def _memcpy(self) -> float:
        began = time.perf_counter()
        self._copy[:] = self._view
        return time.perf_counter() - began

    async def _hand_over(self, kind: str, carrier: Carrier) -> float:
        """From presenting the ticket to the receiver's word that every piece is verified."""
        ticket: Ticket = await self._ask(kind)
        began = time.perf_counter()
        shipment = await carrier.open(ticket, MODEL, lambda _: None)
        runs = self._pool.runs_for(ticket.endpoints[0])
        keys = ticket.endpoints[0].pieces()
        await shipment.send([self._pool.piece(key, key.block, runs) for key in keys])
        await shipment.finish(1)
        seconds = time.perf_counter() - began
        await shipment.close()
        if not self._pipe.recv():
            raise WrongBytes(f"{kind}: the receiver is not ready")
        await self._check(kind)
        return seconds

    async def _raw(self) -> float:
        address = await self._ask("raw")
        began = time.perf_counter()
        with socket.create_connection(address) as sock:
            for start in range(0, self._size, RAW_BYTES):
                sock.sendall(self._view[start : start + RAW_BYTES])
            sock.recv(1)
            seconds = time.perf_counter() - began
        await self._check(RAW)
        return seconds

    async def _mooncake(self) -> float | str:
        """Reads the far end's memory; why not, when that cannot be done."""
        segment: Segment | str = await self._ask("mooncake")
        if isinstance(segment, str):
            return segment
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._copy))
        if self._engine is None:
            self._engine = mooncake.start(HOST)
            self._engine.register_memory(base, self._size)
        began = time.perf_counter()
        for start in range(0, self._size, _READ_BYTES):
            size = min(_READ_BYTES, self._size - start)
            if self._engine.transfer_sync_read(
                segment.name, base + start, segment.address + start, size
            ):
                return "a read failed"
        seconds = time.perf_counter() - began
        if await self._ask("digest") != xxh3_64_intdigest(self._copy):
            raise WrongBytes(MOONCAKE)
        return seconds

    async def _check(self, name: str) -> None:
        if await self._ask("digest") != self._digest:
            raise WrongBytes(name)

    async def _ask(self, order: str) -> Any:
        self._pipe.send(order)
        return await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)


@contextmanager
def _carriers(pool: PoolMemory) -> Iterator[dict[str, Carrier]]:
    ways = {kind: Ways(HOST, (kind,), clock=time.monotonic) for kind in (SHARED_MEMORY, TCP)}
    try:
        yield {kind: way.carrier(pool) for kind, way in ways.items()}
    finally:
        for way in ways.values():
            way.close()
