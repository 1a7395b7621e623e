"""Mooncake's Transfer Engine: the receiver reads out of the source's registered memory.

Control (ticket, what lies where, the end) goes over a TCP socket of ours; bytes and the word go
through the engine, protocol `tcp`, metadata `P2PHANDSHAKE`. A read that was given up may still end
much later, when its source wakes: so the engine never writes into KV memory, only into a buffer of
this transport, and a buffer is used again only once its read has ended.

Who can reach the engine's ports may read and write what is registered, and it listens on every
address of the machine: so a topology must say that the network is trusted.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from core.address import split_address
from core.errors import ConfigError, TransferFailed
from core.kv.shards import PoolMemory
from core.kv.ticket import Offer, Ticket
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import MOONCAKE, single_address
from core.kv.transports.one_sided import Desk, OneSidedLanding
from core.kv.transports.one_sided_send import CONNECT_TIMEOUT_S, OneSidedShipment, present
from core.kv.transports.one_sided_wire import Memory, Shown, Source
from core.kv.transports.words import WORD_BYTES, Words

log = logging.getLogger("skerry.kv")

SLOT_BYTES = 1 << 20
_MOST_SLOTS = 64
_GAP_BYTES = 64 << 10
"""Spans no further apart are read in one go, with what lies between them."""
_POLL_S, _SLOWEST_POLL_S = 0.0001, 0.05
_COMPLETE, _FAILED = 1, -1
"""What the engine says of a read; it forgets the read once it has said one of the first two."""


def load() -> Any:
    """Mooncake's module, which has no types. Raises ConfigError where it is not to be had."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its own words fill a page at every start
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"transport mooncake: {error}; it takes the extra [mooncake] and the system's "
            "libraries that README names"
        ) from error


def start(host: str) -> Any:
    """A TransferEngine of Mooncake. Raises ConfigError."""
    engine = load().TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise ConfigError(f"transport mooncake: its engine does not start on {host}")
    return engine


class Engine:
    """One of Mooncake's engines, as `start` gives them, and the buffers that it reads into."""

    def __init__(self, engine: Any, host: str) -> None:
        self.segment = f"{host}:{engine.get_rpc_port()}"
        self._engine = engine
        self._registered: list[memoryview] = []
        self._free: list[memoryview] = []
        self._room = asyncio.Semaphore(_MOST_SLOTS)
        self._ending: set[asyncio.Task[bool]] = set()

    def register(self, view: memoryview) -> int:
        """Let the engine, and with it our peers, at `view`, which is kept; its address. A peer that
        has read from here before does not hear of it: so everything at the start, each thing once.
        Raises ConfigError."""
        base = _address(view)
        if self._engine.register_memory(base, len(view)):
            raise ConfigError("transport mooncake: memory cannot be registered")
        self._registered.append(view)
        return base

    async def read(
        self, segment: str, address: int, size: int, take: Callable[[memoryview], None]
    ) -> None:
        """Read at most SLOT_BYTES of a peer's memory and call `take` with them, which must not keep
        them. Raises TransferFailed."""
        await self._room.acquire()
        slot = self._free.pop() if self._free else self._new_slot()
        filling = asyncio.create_task(self._fill(slot, segment, address, size))
        self._ending.add(filling)
        filling.add_done_callback(self._ending.discard)
        try:
            intact = await asyncio.shield(filling)
        except asyncio.CancelledError:  # the slot is free again when the engine is done with it
            filling.add_done_callback(lambda _: self._give_back(slot))
            raise
        try:
            if not intact:
                raise TransferFailed("the source's memory cannot be read")
            take(slot[:size])
        finally:
            self._give_back(slot)

    def close(self) -> None:
        for filling in self._ending:
            filling.cancel()

    async def _fill(self, slot: memoryview, segment: str, address: int, size: int) -> bool:
        """Whether `slot` has the bytes. Returns when the engine no longer writes into it."""
        # One request a batch: the engine tells the state of a batch's first alone.
        batch = self._engine.batch_transfer_async_read(segment, [_address(slot)], [address], [size])
        if batch <= 0:
            return False
        pause = _POLL_S
        while True:
            state = self._engine.transfer_check_status(batch)
            if state in (_COMPLETE, _FAILED):
                return bool(state == _COMPLETE)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_S)

    def _new_slot(self) -> memoryview:
        slot = memoryview(mmap.mmap(-1, SLOT_BYTES))
        self.register(slot)
        return slot

    def _give_back(self, slot: memoryview) -> None:
        self._free.append(slot)
        self._room.release()


class MooncakeCarrier:
    """Shows one pool's memory. See `base.Carrier`."""

    def __init__(self, engine: Engine, memory: PoolMemory, words: Words, words_base: int) -> None:
        """`words_base`: where `words` are registered. Raises ConfigError."""
        self._engine = engine
        self._words = words
        self._words_base = words_base
        self._memories = tuple(
            Memory(rank, len(held.view), engine.register(held.view))
            for rank, held in memory.ranks.items()
        )

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> OneSidedShipment:
        address = single_address(ticket)
        loop = asyncio.get_running_loop()
        word = self._words.publish()
        sock: socket.socket | None = None
        try:
            host, port = split_address(address)
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, (host, port))
            source = Source(
                slot=word.slot,
                value=word.value,
                memories=self._memories,
                segment=self._engine.segment,
                words=self._words_base,
            )
            return await present(sock, ticket, model, source, (), failed, self._words, checked=True)
        except BaseException as error:
            self._words.revoke(word)
            if sock is not None:
                sock.close()
            if isinstance(error, OSError | ConfigError):
                why = f"the receiver at {address} cannot be reached: {error}"
                raise TransferFailed(why) from error
            raise


class MooncakeWay:
    """A `one_sided.Way`: the ticket is the only credential."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def admit(self, sock: socket.socket) -> bool:
        return True

    def attach(self, source: Source, descriptors: Sequence[int]) -> MooncakeReader:
        return MooncakeReader(self._engine, source)


@dataclass(frozen=True, slots=True)
class Fetch:
    """`size` bytes from `offset` on, to be read in one go; `cuts`: (from here, to there, how many)
    of them make the piece."""

    rank: int
    offset: int
    size: int
    cuts: tuple[tuple[int, int, int], ...]


class MooncakeReader:
    """A `one_sided.Reader`."""

    window = 4

    def __init__(self, engine: Engine, source: Source) -> None:
        self._engine = engine
        self._source = source
        self._memories = {memory.rank: memory for memory in source.memories}

    async def copy(
        self, piece: Shown, place: memoryview, may_write: Callable[[], bool]
    ) -> bool | None:
        for fetch in fetches(piece.spans):
            memory = self._memories.get(fetch.rank)
            if memory is None or not 0 <= fetch.offset <= memory.size - fetch.size:
                raise TransferFailed("the source speaks of memory that it has not shown")

            def cut(data: memoryview, fetch: Fetch = fetch) -> None:
                if may_write():
                    for here, there, size in fetch.cuts:
                        place[there : there + size] = data[here : here + size]

            await self._engine.read(
                self._source.segment, memory.base + fetch.offset, fetch.size, cut
            )
        if not await self._stands():
            return None
        return xxh3_64_intdigest(place) == piece.digest

    def close(self) -> None:
        """Nothing is held between two reads."""

    async def _stands(self) -> bool:
        """As `words.stands`; the read of the word begins when those of the bytes have ended."""
        found: list[int] = []
        address = self._source.words + self._source.slot * WORD_BYTES
        await self._engine.read(
            self._source.segment, address, WORD_BYTES, lambda data: found.append(data.cast("Q")[0])
        )
        return found == [self._source.value]


def fetches(spans: Sequence[tuple[int, int, int]]) -> Iterator[Fetch]:
    """Few large reads for what may be many small spans, each of at most SLOT_BYTES."""
    rank, start, end, there = -1, 0, 0, 0
    cuts: list[tuple[int, int, int]] = []
    for one, offset, size in spans:
        while size:
            near = one == rank and end <= offset <= end + _GAP_BYTES
            if cuts and not (near and offset < start + SLOT_BYTES):
                yield Fetch(rank, start, end - start, tuple(cuts))
                cuts = []
            if not cuts:
                rank, start = one, offset
            count = min(size, start + SLOT_BYTES - offset)
            cuts.append((offset - start, there, count))
            end = offset + count
            offset, size, there = end, size - count, there + count
    if cuts:
        yield Fetch(rank, start, end - start, tuple(cuts))


def listen(
    engine: Engine, host: str, clock: Callable[[], float], awaited: Awaited
) -> OneSidedLanding:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    port = listener.getsockname()[1]
    offer = Offer(MOONCAKE, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return OneSidedLanding(listener, offer, Desk(MooncakeWay(engine), awaited, clock))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
