"""The data socket against peers that misbehave."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from dataclasses import replace

import pytest
from xxhash import xxh3_64_intdigest

from core.address import split_address
from core.errors import TransferFailed
from core.kv.handoff import Failure, Phase, Refusal
from core.kv.ticket import Endpoint, Offer, PieceKey, Ticket, new_ticket_id
from core.kv.transports import tcp_send
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import Piece
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier, TcpShipment
from core.kv.transports.tcp_wire import (
    HEAD_BYTES,
    HELLO_BYTES,
    REPLY_BYTES,
    Reply,
    decode_head,
    decode_hello,
    decode_reply,
    encode_end,
    encode_hello,
    encode_piece,
    encode_reply,
)
from tests.core.kv.receivers import (
    GROUPS,
    MODEL,
    STREAMS,
    WAIT_S,
    Side,
    phase_of,
    receiver,
    whole,
)
from tests.listeners import Failing


class Raw:
    """A sender that may say anything."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._sock = socket.socket()
        self._sock.setblocking(False)

    async def __aenter__(self) -> Raw:
        address = split_address(self._side.landing.address)
        await asyncio.get_running_loop().sock_connect(self._sock, address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sock.close()

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def go_on_with(self, data: bytes) -> None:
        """Until the other end has had enough."""
        while True:
            await self.say(data)
            await asyncio.sleep(0)

    async def hear(self) -> tuple[Reply, Refusal] | None:
        async with asyncio.timeout(WAIT_S):
            data = await asyncio.get_running_loop().sock_recv(self._sock, REPLY_BYTES)
        return decode_reply(data) if data else None


def test_a_block_whose_bytes_do_not_match_their_checksum_fails_the_transfer() -> None:
    async def go() -> None:
        async with receiver("tcp") as side, Raw(side) as raw:
            await raw.say(encode_hello(side.ticket, MODEL))
            assert await raw.hear() == (Reply.WELCOME, Refusal.TICKET)
            data = os.urandom(GROUPS[0].block_bytes)
            digest = xxh3_64_intdigest(data)
            broken = bytes([data[0] ^ 1]) + data[1:]
            await raw.say(encode_piece(PieceKey(0, 0, 0), len(data), digest) + broken)
            assert await raw.hear() == (Reply.FAILED, Refusal.CHECKSUM)
            assert side.settled.is_set()
            assert side.incoming.failure is Failure.CHECKSUM

    asyncio.run(go())


def test_an_abort_within_a_block_leaves_its_second_half_untouched() -> None:
    async def go() -> None:
        async with receiver("tcp") as side, Raw(side) as raw:
            await raw.say(encode_hello(side.ticket, MODEL))
            await raw.hear()
            size = GROUPS[0].block_bytes
            key = PieceKey(0, 0, 1)
            await raw.say(encode_piece(key, size, 0) + b"\xaa" * (size // 2))
            async with asyncio.timeout(WAIT_S):
                while side.received(key)[size // 2 - 1] != 0xAA:
                    await asyncio.sleep(0)
            side.incoming.fail(Failure.ABORTED)
            side.landing.withdraw(side.incoming)
            assert await raw.hear() == (Reply.FAILED, Refusal.ABORTED)
            side.arrival.places[key][:] = bytes(size)  # the rank has given the block away
            with pytest.raises(OSError):
                await raw.go_on_with(b"\xbb" * size)
            assert side.received(key) == bytes(size)

    asyncio.run(go())


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: node\r\nAccept: */*\r\n\r\n......", b"\x00" * HELLO_BYTES],
    ids=["http", "zeros"],
)
def test_bytes_that_are_no_hello_are_turned_away(words: bytes) -> None:
    async def go() -> None:
        async with receiver("tcp") as side, Raw(side) as raw:
            await raw.say(words)
            assert await raw.hear() == (Reply.FAILED, Refusal.PROTOCOL)
            assert phase_of(side.incoming) is Phase.RESERVED

    asyncio.run(go())


def test_an_unknown_head_ends_the_transfer() -> None:
    async def go() -> None:
        async with receiver("tcp") as side, Raw(side) as raw:
            await raw.say(encode_hello(side.ticket, MODEL))
            await raw.hear()
            await raw.say(b"\xff" * HEAD_BYTES)
            assert await raw.hear() == (Reply.FAILED, Refusal.PROTOCOL)
            assert side.settled.is_set()
            assert side.incoming.failure is Failure.PEER_LOST

    asyncio.run(go())


def test_a_hello_byte_by_byte_and_pieces_in_one_go_are_the_same() -> None:
    async def go() -> None:
        async with receiver("tcp") as side, Raw(side) as raw:
            for byte in encode_hello(side.ticket, MODEL):
                await raw.say(bytes([byte]))
            await raw.hear()
            stream = b"".join(
                encode_piece(one.key, one.size, xxh3_64_intdigest(whole(one))) + whole(one)
                for one in side.pieces()
            )
            await raw.say(stream + encode_end(5))
            assert await raw.hear() == (Reply.READY, Refusal.TICKET)
            for piece in side.pieces():
                assert side.received(piece.key) == whole(piece)

    asyncio.run(go())


def test_a_receiver_that_is_gone_is_a_failed_transfer() -> None:
    async def go() -> None:
        async with receiver("tcp") as side:
            ticket = side.ticket
        with pytest.raises(TransferFailed, match="cannot be reached"):
            await TcpCarrier().open(ticket, MODEL, side.failed.append)

    asyncio.run(go())


def test_a_receiver_that_stops_reading_is_given_up_after_the_lease() -> None:
    async def go() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        host, port = listener.getsockname()
        endpoint = Endpoint(0, f"{host}:{port}", 0, 1, 1, "float32", 1, (0,))
        ticket = Ticket(id=new_ticket_id(), generation=1, lease_s=0.1, endpoints=(endpoint,))
        loop = asyncio.get_running_loop()
        opening = asyncio.create_task(TcpCarrier().open(ticket, MODEL, lambda _: None))
        peer, _ = await loop.sock_accept(listener)
        await loop.sock_sendall(peer, encode_reply(Reply.WELCOME))
        shipment = await opening
        piece = Piece(PieceKey(0, 0, 0), (memoryview(bytearray(64 << 20)),))
        with pytest.raises(TransferFailed, match="taken nothing"):
            await shipment.send([piece])
        await shipment.close()
        peer.close()
        listener.close()

    asyncio.run(go())


def test_a_quiet_sender_is_let_go_when_another_hello_finds_its_lease_run_out() -> None:
    async def go() -> None:
        now = [0.0]
        async with receiver("tcp", clock=lambda: now[0]) as side, Raw(side) as raw:
            await raw.say(encode_hello(side.ticket, MODEL))
            assert await raw.hear() == (Reply.WELCOME, Refusal.TICKET)
            now[0] = 31.0
            with pytest.raises(TransferFailed, match="refused"):
                await side.carrier.open(side.ticket, MODEL, side.failed.append)
            assert side.settled.is_set()
            side.landing.withdraw(side.incoming)  # what its owner does then
            assert await raw.hear() == (Reply.FAILED, Refusal.EXPIRED)

    asyncio.run(go())


def test_a_close_that_is_cancelled_still_closes() -> None:
    """An errand may be aborted twice: by its router, and by the end of the session."""

    async def go() -> None:
        async with receiver("tcp") as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            closing = asyncio.create_task(shipment.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            async with asyncio.timeout(WAIT_S):
                await side.settled.wait()
            assert side.incoming.failure is Failure.PEER_LOST

    asyncio.run(go())


def test_the_wire_reads_what_it_wrote() -> None:
    ticket = Ticket(id=new_ticket_id(), generation=9, lease_s=1.0, endpoints=())
    hello = decode_hello(encode_hello(ticket, MODEL))
    assert hello is not None
    assert (hello.ticket_id, hello.generation, hello.model) == (ticket.id, 9, MODEL)
    head = decode_head(encode_piece(PieceKey(1, 2, 3), 4, 5))
    assert head is not None
    assert (head.key, head.size, head.digest) == (PieceKey(1, 2, 3), 4, 5)
    for refusal in Refusal:
        assert decode_reply(encode_reply(Reply.FAILED, refusal)) == (Reply.FAILED, refusal)
    assert decode_reply(b"\x09\x00") is None
    assert decode_reply(b"\x03\xff") is None
    with pytest.raises(TransferFailed, match="hexadecimal"):
        encode_hello(Ticket(id="no hex", generation=9, lease_s=1.0, endpoints=()), MODEL)


# ---------------------------------------------------------------- several connections


def test_streams_share_the_pieces_and_all_hear_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_send, "_BATCH_BYTES", 1)
    monkeypatch.setattr(tcp_send, "_TURN_S", 0.0)

    async def go() -> None:
        async with receiver(STREAMS, blocks=tuple(range(12))) as side:
            used: list[object] = []
            sending = tcp_send._Stream.send

            async def note(stream: tcp_send._Stream, buffers: list[memoryview]) -> None:
                used.append(stream)
                await sending(stream, buffers)

            monkeypatch.setattr(tcp_send._Stream, "send", note)
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            await shipment.send(side.pieces())
            assert [used.count(one) for one in dict.fromkeys(used)] == [8, 8, 8]
            await shipment.finish(5)
            await shipment.close()
            assert side.incoming.computed_tokens == 5
            for piece in side.pieces():
                assert side.received(piece.key) == whole(piece)

    asyncio.run(go())


def test_one_stream_that_breaks_ends_the_transfer_on_both_sides() -> None:
    async def go() -> None:
        async with receiver(STREAMS) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            assert isinstance(shipment, TcpShipment)
            await shipment.send(side.pieces()[:2])
            shipment._streams[1]._link.sock.shutdown(socket.SHUT_RDWR)
            async with asyncio.timeout(WAIT_S):
                await side.settled.wait()
            assert side.incoming.failure is Failure.PEER_LOST
            side.landing.withdraw(side.incoming)  # what its owner does then
            async with asyncio.timeout(WAIT_S):
                while any(not stream._reader.done() for stream in shipment._streams):
                    await asyncio.sleep(0)
            with pytest.raises(TransferFailed):
                await shipment.finish(0)
            await shipment.close()
            assert len(side.failed) == 1, "told once, whatever the number of streams"

    asyncio.run(go())


@pytest.mark.parametrize("first", [False, True], ids=["before the hello", "a stranger's"])
def test_nobody_joins_a_transfer_who_did_not_begin_it(first: bool) -> None:
    async def go() -> None:
        async with receiver("tcp") as side, Raw(side) as raw, Raw(side) as other:
            ticket = side.ticket
            if first:
                await raw.say(encode_hello(side.ticket, MODEL))
                await raw.hear()
                ticket = replace(ticket, id=new_ticket_id())
            await other.say(encode_hello(ticket, MODEL, joins=True))
            refusal = Refusal.TICKET if first else Refusal.CLOSED
            assert await other.hear() == (Reply.FAILED, refusal)
            assert not side.settled.is_set()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("host", "offers", "blocks", "expected"),
    [
        ("127.0.0.1", True, 1000, 1),
        ("10.0.0.1", True, 1000, 4),
        ("10.0.0.1", True, 20, 2),
        ("10.0.0.1", True, 1, 1),
        ("10.0.0.1", False, 1000, 1),
    ],
    ids=["one host", "large", "middling", "small", "an older receiver"],
)
def test_how_many_streams_are_worth_their_while(
    host: str, offers: bool, blocks: int, expected: int
) -> None:
    endpoint = Endpoint(
        0, f"{host}:1", 0, 1, 1, "uint8", 1 << 20, tuple(range(blocks)),
        offers=(Offer("tcp", f"{host}:1"),) if offers else (),
    )  # fmt: skip
    ticket = Ticket(new_ticket_id(), 1, 1.0, (endpoint,))
    assert TcpCarrier()._worthwhile(ticket, host) == expected
    assert TcpCarrier(streams=7)._worthwhile(ticket, host) == (7 if offers else 1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_room_for_a_sender_it_is_taken_in_a_moment_later(number: int) -> None:
    async def go() -> None:
        listener = Failing.on_loopback(number, times=2)
        faults: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        landing = TcpLanding(listener, time.monotonic, Awaited(), None, "127.0.0.1")
        try:
            with socket.create_connection(listener.getsockname()) as sender:
                sender.setblocking(False)
                await loop.sock_sendall(sender, b"\x00" * HELLO_BYTES)
                async with asyncio.timeout(WAIT_S):
                    said = await loop.sock_recv(sender, REPLY_BYTES)
            assert decode_reply(said) == (Reply.FAILED, Refusal.PROTOCOL)
            assert (listener.failed, faults) == (2, [])
        finally:
            landing.close()

    asyncio.run(go())
