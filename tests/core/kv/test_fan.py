"""A hand-over to ranks on two hosts: two data sockets, one ticket, ready when both are."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.handoff import Failure, Incoming, Phase
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Endpoint, PieceKey, Ticket, new_ticket_id
from core.kv.transports.base import Arrival, BlockMemory, Piece, Shipment
from core.kv.transports.fan import FanCarrier, by_address
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.kv.transports.ways import Tls
from tests.core.kv.certificates import self_made
from tests.core.kv.receivers import MODEL, WAIT_S

WHOLE = KVGroup(name="g", layers=4, kv_heads=2, head_dim=8, dtype="float32")
HALVES = [msgspec.structs.replace(WHOLE, first_layer=2 * n, layers=2) for n in (0, 1)]
BLOCKS = (0, 1, 2)


class Hosts:
    """Two receivers with one rank each, a ticket over both, and a source that is not split."""

    def __init__(self, tls: Tls | None = None) -> None:
        server = tls.server if tls is not None else None
        self.landings = [
            TcpLanding.listen(host, time.monotonic, tls=server)
            for host in ("127.0.0.1", "127.0.0.2")
        ]
        self.settled = [asyncio.Event() for _ in HALVES]
        self.memories = [pool(rank, group) for rank, group in enumerate(HALVES)]
        ends = [
            one
            for memory, landing in zip(self.memories, self.landings, strict=True)
            for one in endpoints(memory.geometries, landing.address, ({n: n for n in BLOCKS},))
        ]
        self.ticket = Ticket(new_ticket_id(), 5, 30.0, tuple(ends))
        self.incoming = [
            Incoming(part, MODEL, now=time.monotonic()) for part in by_address(self.ticket).values()
        ]
        for n, landing in enumerate(self.landings):
            places = {
                key: self.memories[n].block(key.rank, 0, key.block)
                for key in self.ticket.endpoints[n].pieces()
            }
            landing.expect(Arrival(self.incoming[n], places, self.settled[n].set))
        self.source = pool(0, WHOLE)
        for block in BLOCKS:
            self.source.block(0, 0, block)[:] = os.urandom(WHOLE.block_bytes)

    def pieces(self) -> list[Piece]:
        return [self.piece(endpoint, key) for endpoint in self.ticket.endpoints
                for key in endpoint.pieces()]  # fmt: skip

    def piece(self, endpoint: Endpoint, key: PieceKey) -> Piece:
        return Piece(key, self.source.parts(0, key.block, self.source.runs_for(endpoint)))


def pool(rank: int, group: KVGroup) -> PoolMemory:
    geometry = KVGeometry(groups=(group,), blocks=(3,))
    return PoolMemory({rank: BlockMemory(geometry, bytearray(geometry.pool_bytes))})


@asynccontextmanager
async def two_hosts(tls: Tls | None = None) -> AsyncIterator[Hosts]:
    hosts = Hosts(tls)
    try:
        async with asyncio.timeout(WAIT_S):
            yield hosts
    finally:
        for landing in hosts.landings:
            landing.close()


def unheard(error: TransferFailed) -> None:
    raise AssertionError(f"nobody was to fail: {error}")


def test_each_host_gets_its_layers_and_both_must_have_them() -> None:
    async def go() -> None:
        async with two_hosts() as hosts:
            carrier = FanCarrier(TcpCarrier())
            shipment = await carrier.open(hosts.ticket, MODEL, unheard)
            await shipment.send([one for one in hosts.pieces() if one.key.rank == 0])
            await shipment.renew()
            await shipment.send([one for one in hosts.pieces() if one.key.rank == 1])
            assert [one.phase for one in hosts.incoming] == [Phase.RECEIVING] * 2
            await shipment.finish(47)
            await shipment.close()
            assert [one.phase for one in hosts.incoming] == [Phase.READY] * 2
            assert [one.computed_tokens for one in hosts.incoming] == [47, 47]
            for block in BLOCKS:
                halves = [bytes(m.block(n, 0, block)) for n, m in enumerate(hosts.memories)]
                assert b"".join(halves) == bytes(hosts.source.block(0, 0, block))

    asyncio.run(go())


def test_all_hosts_show_the_certificate_of_the_first() -> None:
    """It names the node's own address, and the others are reached at theirs."""
    tls = self_made("127.0.0.1")

    async def go() -> None:
        async with two_hosts(tls) as hosts:
            carrier = FanCarrier(TcpCarrier(tls=tls.client))
            shipment = await carrier.open(hosts.ticket, MODEL, unheard)
            await shipment.send(hosts.pieces())
            await shipment.finish(47)
            await shipment.close()
            assert [one.phase for one in hosts.incoming] == [Phase.READY] * 2

    asyncio.run(go())


def test_one_host_that_refuses_fails_the_whole_transfer() -> None:
    async def go() -> None:
        async with two_hosts() as hosts:
            hosts.incoming[1].fail(Failure.ABORTED)
            hosts.landings[1].withdraw(hosts.incoming[1])
            with pytest.raises(TransferFailed, match="refused"):
                await FanCarrier(TcpCarrier()).open(hosts.ticket, MODEL, unheard)
            await hosts.settled[0].wait()
            assert hosts.incoming[0].failure is Failure.PEER_LOST, "the other one was let go"

    asyncio.run(go())


class HalfOpen:
    """The second host never answers."""

    def __init__(self) -> None:
        self.first_open = asyncio.Event()

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        if ticket.endpoints[0].rank:
            await asyncio.Event().wait()
        shipment = await TcpCarrier().open(ticket, model, failed)
        self.first_open.set()
        return shipment


def test_an_opening_that_is_given_up_leaves_no_connection() -> None:
    async def go() -> None:
        async with two_hosts() as hosts:
            inner = HalfOpen()
            opening = asyncio.create_task(FanCarrier(inner).open(hosts.ticket, MODEL, unheard))
            await inner.first_open.wait()
            for _ in range(4):  # whoever cancels again does not stop the cleaning up
                opening.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await opening
            await hosts.settled[0].wait()
            assert hosts.incoming[0].failure is Failure.PEER_LOST

    asyncio.run(go())


def test_one_host_that_lacks_a_block_fails_the_end() -> None:
    async def go() -> None:
        async with two_hosts() as hosts:
            shipment = await FanCarrier(TcpCarrier()).open(hosts.ticket, MODEL, unheard)
            await shipment.send(hosts.pieces()[:-1])
            with pytest.raises(TransferFailed, match="incomplete"):
                await shipment.finish(47)
            await shipment.close()
            assert hosts.incoming[1].failure is Failure.PEER_LOST

    asyncio.run(go())


def test_a_receiver_that_gives_up_is_told_once() -> None:
    async def go() -> None:
        async with two_hosts() as hosts:
            told: list[TransferFailed] = []
            news = asyncio.Event()

            def failed(error: TransferFailed) -> None:
                told.append(error)
                news.set()

            shipment = await FanCarrier(TcpCarrier()).open(hosts.ticket, MODEL, failed)
            for incoming, landing in zip(hosts.incoming, hosts.landings, strict=True):
                incoming.fail(Failure.ABORTED)
                landing.withdraw(incoming)
            await news.wait()
            with pytest.raises(TransferFailed):
                await shipment.send(hosts.pieces())
            await shipment.close()
            assert len(told) == 1

    asyncio.run(go())


def test_a_ticket_without_sockets_cannot_be_served() -> None:
    with pytest.raises(TransferFailed, match="without data sockets"):
        by_address(Ticket(new_ticket_id(), 1, 30.0, ()))
