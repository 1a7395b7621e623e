"""The far end of the transfers that are measured: a process that receives, or is read from."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from xxhash import xxh3_64_intdigest

from core.errors import ConfigError
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.handoff import Incoming, Phase
from core.kv.memory import allocate
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Ticket, model_digest, new_ticket_id
from core.kv.transports import mooncake
from core.kv.transports.base import SHARED_MEMORY, TCP, Arrival, BlockMemory
from core.kv.transports.ways import Ways

GROUP = KVGroup(name="full", layers=30, kv_heads=3, head_dim=64, dtype="bfloat16")
"""A block of the bundled model: 360 KiB."""
MODEL = model_digest(b"model")
HOST = "127.0.0.1"
RAW_BYTES = 1 << 20
"""Of one call on the raw socket, at both ends: the fastest of what was tried."""
LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class Segment:
    """What Mooncake reads from."""

    name: str
    address: int


def geometry(blocks: int) -> KVGeometry:
    return KVGeometry(groups=(GROUP,), blocks=(blocks,))


def memory(blocks: int) -> BlockMemory:
    shape = geometry(blocks)
    descriptor, mapped = allocate(shape.pool_bytes)
    return BlockMemory(shape, mapped, descriptor)


def run(pipe: Connection, blocks: int) -> None:
    """Obey until told to end. Answers each order; a ticket, an address or a digest."""
    asyncio.run(_Far(pipe, blocks).run())


class _Far:
    def __init__(self, pipe: Connection, blocks: int) -> None:
        self._pipe = pipe
        self._blocks = blocks
        self._pool = PoolMemory({0: memory(blocks)})
        self._view = self._pool.ranks[0].view
        self._view[:] = bytes(len(self._view))  # its pages are there, as a pool's are
        self._generation = 0
        self._engine: Any = None  # the package has no types

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ways = {kind: Ways(HOST, (kind,), clock=time.monotonic) for kind in (SHARED_MEMORY, TCP)}
        try:
            while (order := await loop.run_in_executor(None, self._pipe.recv)) != "end":
                if order in ways:
                    await self._receive(ways[order])
                elif order == "raw":
                    self._raw()
                elif order == "mooncake":
                    self._pipe.send(self._segment())
                elif order == "digest":
                    self._pipe.send(xxh3_64_intdigest(self._view))
                    self._view[:] = bytes(len(self._view))
        finally:
            for way in ways.values():
                way.close()

    async def _receive(self, way: Ways) -> None:
        self._generation += 1
        over = asyncio.Event()
        fill = ({n: n for n in range(self._blocks)},)
        landing = way.landing
        ends = endpoints(self._pool.geometries, landing.address, fill, landing.offers)
        ticket = Ticket(new_ticket_id(), self._generation, LEASE_S, tuple(ends))
        places = {
            key: self._pool.block(key.rank, key.group, key.block)
            for endpoint in ticket.endpoints
            for key in endpoint.pieces()
        }
        incoming = Incoming(ticket, MODEL, now=time.monotonic())
        landing.expect(Arrival(incoming, places, over.set))
        self._pipe.send(ticket)
        await over.wait()
        self._pipe.send(incoming.phase is Phase.READY)

    def _raw(self) -> None:
        """Straight into the same memory, by nothing but a socket."""
        with socket.create_server((HOST, 0)) as listener:
            self._pipe.send(listener.getsockname())
            sock, _ = listener.accept()
        with sock:
            rest = self._view
            while rest:
                rest = rest[sock.recv_into(rest[:RAW_BYTES]) :]
            sock.sendall(b"k")

    def _segment(self) -> Segment | str:
        """Our memory, with something in it; or why it cannot be read."""
        if self._engine is None:
            try:
                self._engine = mooncake.start(HOST)
            except ConfigError as error:
                return str(error)
            if self._engine.register_memory(self._address(), len(self._view)):
                return "its memory cannot be registered"
        size = len(self._view)
        self._view[:] = (os.urandom(1 << 20) * (size // (1 << 20) + 1))[:size]
        return Segment(f"{HOST}:{self._engine.get_rpc_port()}", self._address())

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._view))
