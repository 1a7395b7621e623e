"""Transfers that fail: both nodes say so, and neither holds anything afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest
from xxhash import xxh3_64_intdigest

from core.address import split_address
from core.engine import messages as m
from core.errors import TransferFailed
from core.kv.ticket import PieceKey, Ticket, model_digest
from core.kv.transports.base import Piece, Shipment
from core.kv.transports.tcp_send import TcpCarrier, TcpShipment
from core.kv.transports.tcp_wire import REPLY_BYTES, encode_hello, encode_piece
from core.types import FinishReason, Sampling
from regional.node import wire
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import (
    abort,
    answer_text,
    done_of,
    finish_of,
    prefill,
    reserve,
    start,
    work,
)
from tests.regional.node.fake_rank import GEOMETRY
from tests.regional.node.fakes import FakeNode, fake_node
from tests.regional.node.pairs import (
    PROMPT,
    hand_over,
    on_two_nodes,
    receiving,
    say_until_refused,
    succeed,
)


def test_a_prefill_that_fails_frees_the_decode_side_at_once() -> None:  # B20
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        await hand_over(reader, writer, "a.1")
        await receiving(writer)
        reader.rank.fail("a.1:prefill", "no_capacity")
        failed = await reader.desk.failed("a.1")
        assert (failed.stage, failed.code, failed.retryable) == ("prefill", "no_capacity", True)
        writer.say(abort("a.1"))  # what the router does then

    on_two_nodes(test)


def test_a_router_that_is_lost_ends_what_is_read_for_it() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        await hand_over(reader, writer, "a.1")
        await receiving(writer)
        reader.front.session_closed(reader.desk)
        await reader.until_empty()
        assert reader.rank.held == 0
        reader.front.session_opened(reader.desk)
        assert reader.desk.of("failed") == []
        writer.say(abort("a.1"))

    on_two_nodes(test)


def test_fifty_failures_in_a_row_leave_nothing_and_the_next_request_works() -> None:  # B20
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        for number in range(50):
            reader.rank.stall_at = 16 * (number % 5)
            name = f"{number}.1"
            await hand_over(reader, writer, name)
            writer.say(start(name))
            await receiving(writer)
            match number % 3:
                case 0:
                    reader.rank.fail(f"{name}:prefill", "internal_error")
                case 1:
                    reader.say(abort(name))
                case _:
                    writer.landing._connections.copy().pop().close(None)  # type: ignore[attr-defined] # cut
                    writer.say(abort(name))
            if number % 3 != 2:
                assert (await writer.desk.failed(name)).stage == "transfer"
            await writer.until_empty()
            await reader.until_empty()
        reader.rank.resume()
        await succeed(reader, writer, "after.1")
        assert writer.rank.stats().blocks_used == 0

    on_two_nodes(test)


class Meddling(TcpCarrier):
    """Sends properly until `meddle` takes over."""

    def __init__(self, meddle: Callable[[TcpShipment, Sequence[Piece]], Awaitable[None]]) -> None:
        super().__init__()
        self._meddle = meddle

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> TcpShipment:
        shipment = await super().open(ticket, model, failed)
        real: Shipment = shipment

        async def send(pieces: Sequence[Piece]) -> None:
            await TcpShipment.send(shipment, pieces[:1])
            await self._meddle(shipment, pieces[1:])

        real.send = send  # type: ignore[method-assign] # the fault that is under test
        return shipment


async def cut(shipment: TcpShipment, _: Sequence[Piece]) -> None:
    shipment._streams[0]._link.sock.shutdown(socket.SHUT_RDWR)
    await shipment.renew()


async def corrupt(shipment: TcpShipment, pieces: Sequence[Piece]) -> None:
    piece = pieces[0]
    head = encode_piece(piece.key, piece.size, xxh3_64_intdigest(b"".join(piece.parts)) ^ 1)
    await shipment._streams[0].send([memoryview(head), *piece.parts])
    await shipment.finish(0)


@pytest.mark.parametrize(
    ("meddle", "reason"), [(cut, "peer_lost"), (corrupt, "checksum")], ids=["cut", "corrupt"]
)
def test_a_broken_transfer_fails_on_both_sides_and_frees_both(
    meddle: Callable[[TcpShipment, Sequence[Piece]], Awaitable[None]], reason: str
) -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        await hand_over(reader, writer, "a.1")
        writer.say(start("a.1"))
        failed = await writer.desk.failed("a.1")
        assert (failed.stage, failed.retryable) == ("transfer", True)
        assert reason in failed.message
        assert (await reader.desk.failed("a.1")).stage == "transfer"
        assert isinstance(reader.rank.commands[-1], m.Abort)
        assert isinstance(writer.rank.commands[-1], m.Abort)
        assert not [one for one in writer.rank.commands if isinstance(one, m.Begin)]

    on_two_nodes(test, carrier=Meddling(meddle))


def test_a_lease_without_a_sender_runs_out() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.say(reserve("a.1", work(PROMPT)))
        failed = await writer.desk.failed("a.1")
        assert (failed.stage, failed.retryable) == ("transfer", True)
        assert "expired" in failed.message

    on_two_nodes(test, lease_s=0.05)


def test_a_slow_prefill_keeps_its_lease() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        await hand_over(reader, writer, "a.1")
        writer.say(start("a.1"))
        await asyncio.sleep(2.5)  # more than two leases; the time is what is under test
        assert not writer.desk.of("failed")
        reader.rank.resume()
        assert answer_text(await writer.desk.ended("a.1")) == "hello"

    on_two_nodes(test, lease_s=1.2)


def test_a_prefill_past_its_deadline_is_given_up() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        reader.rank.stall_at = 64
        writer.say(reserve("a.1", work(PROMPT)))
        reserved = await writer.desk.reserved("a.1")
        reader.say(prefill("a.1", work(PROMPT, deadline_s=0.05), reserved.ticket))
        failed = await reader.desk.failed("a.1")
        assert (failed.stage, failed.code) == ("prefill", "deadline_exceeded")
        assert (await writer.desk.failed("a.1")).stage == "transfer"

    on_two_nodes(test)


def test_nodes_of_different_models_do_not_exchange_blocks() -> None:
    async def go() -> None:
        async with fake_node(model=b"another") as reader, fake_node() as writer:
            await hand_over(reader, writer, "a.1")
            assert "ticket" in (await reader.desk.failed("a.1")).message
            writer.say(abort("a.1"))
            await reader.until_empty()
            await writer.until_empty()

    asyncio.run(go())


def test_a_ticket_of_another_shape_is_refused_before_anything_is_sent() -> None:
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        writer.say(reserve("a.1", work(PROMPT)))
        ticket = (await writer.desk.reserved("a.1")).ticket
        ticket.endpoints[0].block_bytes += 1
        reader.say(prefill("a.1", work(PROMPT), ticket))
        assert "shape" in (await reader.desk.failed("a.1")).message
        assert reader.rank.commands == []
        writer.say(abort("a.1"))

    on_two_nodes(test)


def test_an_abort_within_a_block_never_lets_its_rest_into_the_rank() -> None:
    """The rank clears freed blocks; the half that comes afterwards must find no way in."""

    async def test(reader: FakeNode, writer: FakeNode) -> None:
        loop = asyncio.get_running_loop()
        writer.say(reserve("a.1", work(PROMPT)))
        given = wire.ticket((await writer.desk.reserved("a.1")).ticket)
        with socket.socket() as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, split_address(given.endpoints[0].address))
            await loop.sock_sendall(raw, encode_hello(given, model_digest(b"model")))
            await loop.sock_recv(raw, REPLY_BYTES)
            data = os.urandom(GEOMETRY.groups[0].block_bytes)
            head = encode_piece(PieceKey(0, 0, 3), len(data), xxh3_64_intdigest(data))
            await loop.sock_sendall(raw, head + data[:100])
            arrival = await receiving(writer)
            place = arrival.places[PieceKey(0, 0, 3)]
            async with asyncio.timeout(30):
                while bytes(place[:100]) != data[:100]:
                    await asyncio.sleep(0)
            writer.say(abort("a.1"))
            assert not any(place)
            with pytest.raises(OSError):
                await say_until_refused(raw, data[100:])
            assert not any(place)

    on_two_nodes(test)


def test_a_limit_of_one_token_holds_after_a_hand_off() -> None:  # B19
    async def test(reader: FakeNode, writer: FakeNode) -> None:
        given = work(PROMPT, Sampling(max_tokens=1))
        writer.say(reserve("a.1", given))
        ticket: pb.Ticket = (await writer.desk.reserved("a.1")).ticket
        reader.say(prefill("a.1", given, ticket))
        writer.say(start("a.1"))
        events = await writer.desk.ended("a.1")
        assert finish_of(events) is FinishReason.LENGTH
        assert done_of(events).usage.completion_tokens == 1

    on_two_nodes(test)
