"""What only transports have whose receiver reads: words, spans, and other processes' memory."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import TransferFailed
from core.kv.handoff import Failure
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Offer, PieceKey
from core.kv.transports import shared
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import MOONCAKE, SHARED_MEMORY, Piece, Span
from core.kv.transports.mooncake import SLOT_BYTES, MooncakeReader, fetches
from core.kv.transports.one_sided import Desk, OneSidedLanding, Reader
from core.kv.transports.one_sided_send import digest_of
from core.kv.transports.one_sided_wire import HELLO_BYTES, Memory, Shown, Source, shown
from core.kv.transports.shared import SharedReader, SharedWay
from core.kv.transports.words import Word, Words, stands
from tests.core.kv.receivers import GEOMETRY, MODEL, WAIT_S, receiver, send_all, source_memory
from tests.core.kv.test_layout import cut, pool, random_split, whole_group
from tests.listeners import Failing

# ---------------------------------------------------------------- words


def test_a_word_stands_until_it_is_revoked_and_never_comes_back() -> None:
    words = Words()
    view = memoryview(words.memory).cast("Q")
    seen: set[Word] = set()
    for _ in range(2000):  # more than the page has slots
        word = words.publish()
        assert word not in seen
        seen.add(word)
        assert stands(view, word)
        words.revoke(word)
        words.revoke(word)
        assert not any(stands(view, one) for one in seen)
    words.close()


def test_more_transfers_than_words_are_refused_and_a_freed_word_serves_again() -> None:
    words = Words()
    taken = [words.publish() for _ in range(512)]
    with pytest.raises(TransferFailed, match="512 transfers"):
        words.publish()
    words.revoke(taken[7])
    assert words.publish().slot == taken[7].slot
    words.close()


# ---------------------------------------------------------------- any layout to any layout


class FakeEngine:
    """Reads from memory of this process, by address."""

    def __init__(self, memories: Mapping[int, memoryview]) -> None:
        self._memories = memories

    async def read(
        self, segment: str, address: int, size: int, take: Callable[[memoryview], None]
    ) -> None:
        assert size <= SLOT_BYTES
        base = max(base for base in self._memories if base <= address)
        data = self._memories[base][address - base : address - base + size]
        assert len(data) == size, "past the end of what is registered"
        take(memoryview(bytes(data)))


def readers(source: PoolMemory, words: memoryview, word: Word) -> Iterator[Reader]:
    views = {rank: memory.view for rank, memory in source.ranks.items()}
    yield SharedReader(views, words, word)
    bases = {rank: (rank + 1) << 32 for rank in views}
    told = tuple(Memory(rank, len(view), bases[rank]) for rank, view in views.items())
    engine = FakeEngine({bases[rank]: view for rank, view in views.items()} | {0: words.cast("B")})
    yield MooncakeReader(
        engine,  # type: ignore[arg-type] # all of it that a reader uses
        Source(slot=word.slot, value=word.value, memories=told),
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_receiver_reads_its_own_layout_out_of_any_other(seed: int) -> None:
    chance = random.Random(seed)
    group = whole_group(chance)
    here, there = pool(random_split(group, chance)), pool(random_split(group, chance))
    block = os.urandom(group.block_bytes)
    for rank, memory in here.ranks.items():
        part = memory.geometry.groups[0]
        if part.layers:
            here.block(rank, 0, 1)[:] = cut(group, block, part)

    async def go() -> None:
        words = memoryview(bytearray(16)).cast("Q")
        words[1] = 5
        for reader in readers(here, words, Word(1, 5)):
            for endpoint in endpoints(there.geometries, "nowhere", ({0: 2},)):
                piece = here.piece(PieceKey(endpoint.rank, 0, 0), 1, here.runs_for(endpoint))
                place = there.block(endpoint.rank, 0, 2)
                place[:] = bytes(len(place))
                told = shown(piece, digest_of(piece))
                assert await reader.copy(told, place, lambda: True) is True
                expected = cut(group, block, there.ranks[endpoint.rank].geometry.groups[0])
                assert bytes(place) == expected
                words[1] = 6
                assert await reader.copy(told, place, lambda: True) is None
                words[1] = 5

    asyncio.run(go())


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 3 << 20), st.integers(1, 2 << 20)), max_size=9
    )
)
def test_spans_are_read_in_pieces_that_fit_and_come_back_whole(
    spans: list[tuple[int, int, int]],
) -> None:
    covered: list[tuple[int, int, int, int]] = []
    for fetch in fetches(spans):
        assert 0 < fetch.size <= SLOT_BYTES
        for here, there, size in fetch.cuts:
            assert 0 <= here <= here + size <= fetch.size
            covered.append((there, fetch.rank, fetch.offset + here, size))
    at = 0
    expected = []
    for rank, offset, size in spans:
        expected += [(at + n, rank, offset + n) for n in (0, size // 2, size - 1)]
        at += size
    assert sum(size for *_, size in covered) == at

    def source_of(place: int) -> tuple[int, int]:
        (found,) = [
            (rank, offset + place - there)
            for there, rank, offset, size in covered
            if there <= place < there + size
        ]
        return found

    assert [(place, *source_of(place)) for place, _, _ in expected] == expected


def test_many_small_spans_are_few_reads() -> None:
    spans = [(0, 4096 * n, 2048) for n in range(200)]
    assert len(list(fetches(spans))) == 1


# ---------------------------------------------------------------- memory of other processes


def test_a_source_that_speaks_of_foreign_memory_ends_the_transfer() -> None:
    """By its rank, past the end, before the start."""

    async def go(rank: int, offset: int) -> None:
        async with receiver(SHARED_MEMORY) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            good = side.pieces()[0]
            bad = Piece(good.key, good.parts, (Span(rank, offset, good.size),))
            with pytest.raises(TransferFailed):
                await send_all(shipment, [bad])
            await shipment.close()
            async with asyncio.timeout(WAIT_S):
                await side.settled.wait()
            assert side.incoming.failure is Failure.PEER_LOST
            assert not any(side.memory)

    for rank, offset in ((1, 0), (0, GEOMETRY.pool_bytes - 16), (0, -16)):
        asyncio.run(go(rank, offset))


@pytest.mark.parametrize("kind", [SHARED_MEMORY, MOONCAKE])
def test_spans_that_make_no_sense_end_the_transfer(kind: str) -> None:
    """Their sum is right; one of them runs backwards."""

    async def go() -> None:
        async with receiver(kind) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            good = side.pieces()[0]
            bad = Piece(good.key, good.parts, (Span(0, 64, -32), Span(0, 0, good.size + 32)))
            with pytest.raises(TransferFailed, match="protocol"):
                await send_all(shipment, [bad])
            await shipment.close()
            assert side.incoming.failure is Failure.PEER_LOST
            assert not any(side.memory)

    asyncio.run(go())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n" * 9,
        bytes(200),
        b"SKR1" + b"\xff" * (HELLO_BYTES - 6) + b"\x00\x03...",
    ],
    ids=["http", "zeros", "no source"],
)
def test_bytes_that_are_no_hello_change_nothing(garbage: bytes) -> None:
    async def go() -> None:
        async with receiver(SHARED_MEMORY) as side:
            loop = asyncio.get_running_loop()
            (offer,) = side.landing.offers
            with socket.socket(socket.AF_UNIX) as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, "\0" + offer.address.removeprefix("@"))
                await loop.sock_sendall(sock, garbage)
                async with asyncio.timeout(WAIT_S):
                    assert b"refused" in await loop.sock_recv(sock, 100)
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            await send_all(shipment, side.pieces())
            await shipment.close()

    asyncio.run(go())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_room_for_a_source_it_is_taken_in_a_moment_later(number: int) -> None:
    async def go() -> None:
        plain = socket.socket(socket.AF_UNIX)
        plain.bind(f"\0skerry-test-{os.getpid()}-{number}")
        plain.listen()
        listener = Failing.of(plain, number, times=2)
        faults: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        offer = Offer(SHARED_MEMORY, "@nowhere")
        landing = OneSidedLanding(listener, offer, Desk(SharedWay(), Awaited(), time.monotonic))
        try:
            with socket.socket(socket.AF_UNIX) as source:
                source.setblocking(False)
                await loop.sock_connect(source, listener.getsockname())
                await loop.sock_sendall(source, bytes(HELLO_BYTES))
                async with asyncio.timeout(WAIT_S):
                    assert b"refused" in await loop.sock_recv(source, 100)
            assert (listener.failed, faults) == (2, [])
        finally:
            landing.close()

    asyncio.run(go())


def test_memory_that_could_shrink_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a page that is gone is killed."""

    async def go() -> None:
        with ExitStack() as stack:
            source = source_memory(stack)
            descriptor = os.memfd_create("not-sealed")
            stack.callback(os.close, descriptor)
            os.ftruncate(descriptor, GEOMETRY.pool_bytes)
            source.ranks[0].descriptor = descriptor
            monkeypatch.setattr("tests.core.kv.receivers.source_memory", lambda _: source)
            async with receiver(SHARED_MEMORY) as side:
                with pytest.raises(TransferFailed, match="refused"):
                    await side.carrier.open(side.ticket, MODEL, side.failed.append)

    asyncio.run(go())


@pytest.mark.parametrize("how", ["close", "close that is cancelled", "opening that is refused"])
def test_what_was_shown_is_taken_back_however_it_ends(how: str) -> None:
    """Before `close` returns, or is cut short: the rank reuses the blocks next."""

    async def go() -> None:
        async with receiver(SHARED_MEMORY) as side:
            way = side.carrier._inner._carriers[SHARED_MEMORY]  # type: ignore[attr-defined] # behind the seam
            words = way._words
            standing = memoryview(words.memory).cast("Q")
            if how == "opening that is refused":
                side.incoming.fail(Failure.ABORTED)
                with pytest.raises(TransferFailed):
                    await side.carrier.open(side.ticket, MODEL, side.failed.append)
                assert not any(standing)
                return
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            assert any(standing)
            closing = asyncio.create_task(shipment.close())
            await asyncio.sleep(0)
            assert not any(standing), "it waits for nothing"
            if how != "close":
                closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)

    asyncio.run(go())


def test_another_users_process_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with receiver(SHARED_MEMORY) as side:
            monkeypatch.setattr(shared, "peer_uid", lambda _: os.geteuid() + 1)
            with pytest.raises(TransferFailed, match="another user's"):
                await side.carrier.open(side.ticket, MODEL, side.failed.append)

    asyncio.run(go())


def test_a_peer_can_only_read() -> None:
    with ExitStack() as stack:
        source = source_memory(stack)
        descriptor = source.ranks[0].descriptor
        assert descriptor is not None
        given = shared._for_reading(descriptor)
        stack.callback(os.close, given)
        assert mmap.mmap(given, GEOMETRY.pool_bytes, prot=mmap.PROT_READ)[:8] == bytes(
            source.ranks[0].view[:8]
        )
        with pytest.raises(PermissionError):
            mmap.mmap(given, GEOMETRY.pool_bytes)


def test_transfers_leave_no_descriptor_and_a_dead_peers_memory_is_let_go() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def go() -> None:
        async with receiver(SHARED_MEMORY) as side:
            landing = side.landing._all[0]  # type: ignore[attr-defined] # to look behind the seam
            way = landing._desk.way
            counts: list[int] = []
            for _ in range(5):
                shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
                await shipment.close()
                async with asyncio.timeout(WAIT_S):
                    await side.settled.wait()
                    while landing._connections:
                        await asyncio.sleep(0)
                side.settled.clear()
                side.arrival.incoming.__init__(side.ticket, MODEL, now=time.monotonic())  # type: ignore[misc] # anew
                side.landing.expect(side.arrival)
                counts.append(opened())
            assert counts[-1] <= counts[0], "a descriptor stays behind with each transfer"
            assert len(way._mapped) == 2
            way.close()  # as its lifeline's end does
            assert not way._mapped

    asyncio.run(go())


def test_the_event_loop_is_never_held_for_long() -> None:
    """A block of 64 MiB is copied in turns."""

    async def go() -> None:
        size = 64 << 20
        source = memoryview(bytearray(size))
        place = memoryview(bytearray(size))
        words = memoryview(bytearray(8)).cast("Q")
        words[0] = 1
        reader = SharedReader({0: source}, words, Word(0, 1))
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        beside = asyncio.create_task(others())
        assert await reader.copy(Shown(0, 0, 0, ((0, 0, size),)), place, lambda: True)
        beside.cancel()
        assert turns > 3

    asyncio.run(go())
