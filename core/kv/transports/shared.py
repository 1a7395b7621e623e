"""Shared memory between node fronts of one host: the receiver maps the source's KV memory, for
reading only, and copies from pool to pool.

Who may do so: processes of the same user, which the kernel vouches for, with a valid ticket. The
address is an abstract Unix socket, so nothing is left behind by a front that is killed; it means
something on this machine and in this network namespace alone, which is what `host_identity` says.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from core.errors import TransferFailed
from core.kv.shards import PoolMemory
from core.kv.ticket import Offer, Ticket
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import SHARED_MEMORY, single_address
from core.kv.transports.one_sided import Desk, OneSidedLanding
from core.kv.transports.one_sided_send import CONNECT_TIMEOUT_S, TURN_S, OneSidedShipment, present
from core.kv.transports.one_sided_wire import Memory, Shown, Source
from core.kv.transports.sockets import peer_uid
from core.kv.transports.words import WORD_BYTES, Word, Words, stands

_QUANTUM = 1 << 20
"""Copied in one go: about a tenth of a millisecond."""
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2)
_LIFELINE, _WORDS, _MEMORIES = 0, 1, 2
"""The descriptors of a hello, in this order."""


def supported() -> bool:
    """Sealed anonymous memory and abstract sockets are Linux's."""
    return sys.platform == "linux" and host_identity() != ""


def host_identity() -> str:
    """Equal in two processes where a shared-memory address of one means the same to the other;
    empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


class SharedCarrier:
    """Shows one pool's memory. See `base.Carrier`; `close` once no shipment is open."""

    def __init__(self, memory: PoolMemory, words: Words, lifeline: int) -> None:
        """`lifeline`: the reading end of a pipe whose writing end is held as long as this process
        lives. Raises TransferFailed when a rank's memory has no descriptor."""
        self._words = words
        self._memories = []
        self._descriptors = [lifeline, _for_reading(words.descriptor)]
        for rank, held in memory.ranks.items():
            if held.descriptor is None:
                raise TransferFailed(f"the memory of rank {rank} cannot be shared")
            self._memories.append(Memory(rank, len(held.view)))
            self._descriptors.append(_for_reading(held.descriptor))

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> OneSidedShipment:
        address = single_address(ticket)
        word = self._words.publish()
        sock: socket.socket | None = None
        try:
            sock = await _connect(address)
            source = Source(slot=word.slot, value=word.value, memories=tuple(self._memories))
            return await present(
                sock, ticket, model, source, self._descriptors, failed, self._words, checked=False
            )
        except BaseException:  # a refusal, or our own cancellation: nobody else holds them
            self._words.revoke(word)
            if sock is not None:
                sock.close()
            raise

    def close(self) -> None:
        for descriptor in self._descriptors[_WORDS:]:
            os.close(descriptor)


async def _connect(address: str) -> socket.socket:
    """Raises TransferFailed."""
    loop = asyncio.get_running_loop()
    with ExitStack() as until_connected:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            until_connected.callback(sock.close)
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, _socket_name(address))
        except (OSError, TimeoutError) as error:
            raise TransferFailed(f"the receiver at {address} cannot be reached: {error}") from error
        if peer_uid(sock) != os.geteuid():
            raise TransferFailed(f"the receiver at {address} is another user's")
        until_connected.pop_all()
    return sock


class SharedWay:
    """A `one_sided.Way`. Memory of a peer stays mapped between transfers while the peer lives:
    mapping it anew costs a page fault for every 64 KiB."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mapped: dict[tuple[int, int], _Mapped] = {}
        self._lifelines: dict[tuple[int, int], int] = {}

    def admit(self, sock: socket.socket) -> bool:
        return peer_uid(sock) == os.geteuid()

    def attach(self, source: Source, descriptors: Sequence[int]) -> SharedReader:
        if len(descriptors) != _MEMORIES + len(source.memories):
            raise TransferFailed("the source has sent other descriptors than it speaks of")
        life = _identity(descriptors[_LIFELINE])
        if life not in self._lifelines:
            lifeline = self._lifelines[life] = os.dup(descriptors[_LIFELINE])
            self._loop.add_reader(lifeline, self._let_go, life)
        words = self._map(descriptors[_WORDS], life)
        if not 0 <= source.slot < len(words) // WORD_BYTES:
            raise TransferFailed("the source's word is not on its page")
        memories = {
            memory.rank: self._map(descriptor, life)
            for memory, descriptor in zip(source.memories, descriptors[_MEMORIES:], strict=True)
        }
        return SharedReader(memories, words.cast("Q"), source.word)

    def close(self) -> None:
        for life in tuple(self._lifelines):
            self._let_go(life)

    def _map(self, descriptor: int, life: tuple[int, int]) -> memoryview:
        """Raises TransferFailed for memory that could shrink under us: reading it then would kill
        this process."""
        identity = _identity(descriptor)
        known = self._mapped.get(identity)
        if known is not None and known.life == life:
            return known.view
        try:
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS:
                raise TransferFailed("the source's memory is not sealed")
            mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"the source's memory cannot be mapped: {error}") from error
        view = memoryview(mapped)
        self._mapped[identity] = _Mapped(view, life)
        return view

    def _let_go(self, life: tuple[int, int]) -> None:
        """The peer has ended: what it had mapped goes with the last reader of it."""
        lifeline = self._lifelines.pop(life)
        self._loop.remove_reader(lifeline)
        os.close(lifeline)
        self._mapped = {key: one for key, one in self._mapped.items() if one.life != life}


@dataclass(frozen=True, slots=True)
class _Mapped:
    view: memoryview
    life: tuple[int, int]


class SharedReader:
    """A `one_sided.Reader`."""

    window = 1

    def __init__(self, memories: Mapping[int, memoryview], words: memoryview, word: Word) -> None:
        self._memories = memories
        self._words = words
        self._word = word
        self._turn = perf_counter()

    async def copy(
        self, piece: Shown, place: memoryview, may_write: Callable[[], bool]
    ) -> bool | None:
        at = 0
        for rank, offset, size in piece.spans:
            memory = self._memories.get(rank)
            end = offset + size
            if memory is None or not 0 <= offset <= end <= len(memory):
                raise TransferFailed("the source speaks of memory that it has not shown")
            while offset < end:
                if perf_counter() - self._turn > TURN_S:
                    await asyncio.sleep(0)
                    self._turn = perf_counter()
                    if not may_write():
                        return None
                count = min(_QUANTUM, end - offset)
                place[at : at + count] = memory[offset : offset + count]
                offset += count
                at += count
        return True if stands(self._words, self._word) else None

    def close(self) -> None:
        self._words.release()


def listen(clock: Callable[[], float], awaited: Awaited) -> tuple[OneSidedLanding, SharedWay]:
    """Raises OSError."""
    address = f"@skerry-kv-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_socket_name(address))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    way = SharedWay()
    offer = Offer(SHARED_MEMORY, address, host_identity())
    return OneSidedLanding(listener, offer, Desk(way, awaited, clock)), way


def _socket_name(address: str) -> str:
    return "\0" + address.removeprefix("@")


def _for_reading(descriptor: int) -> int:
    """The same memory through a descriptor that cannot be written with."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
