"""Which way a transfer goes."""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest

from core.errors import ConfigError, TransferFailed
from core.kv.handoff import Failure, Incoming, Phase
from core.kv.shards import endpoints
from core.kv.ticket import Endpoint, Offer, PieceKey, Ticket, new_ticket_id
from core.kv.transports import mooncake, shared
from core.kv.transports.base import MOONCAKE, SHARED_MEMORY, TCP, TCP_TLS, Arrival, Shipment
from core.kv.transports.choose import ChoosingCarrier, ways
from core.kv.transports.one_sided_send import OneSidedShipment
from core.kv.transports.tcp_send import TcpCarrier, TcpShipment
from core.kv.transports.ways import KINDS, Tls, Ways, check
from tests.core.kv.certificates import self_made
from tests.core.kv.receivers import GEOMETRY, MODEL, source_memory

HERE, THERE = "this host", "another"
OFFERS = (
    Offer(TCP, "10.0.0.1:1"),
    Offer(SHARED_MEMORY, "@name", HERE),
    Offer(MOONCAKE, "10.0.0.1:2"),
    Offer("pigeons", "loft"),
)


def wanted(offers: tuple[Offer, ...]) -> Endpoint:
    return Endpoint(0, "10.0.0.1:1", 0, 1, 1, "uint8", 1, (0,), offers=offers)


@pytest.mark.parametrize(
    ("kinds", "host", "offers", "expected"),
    [
        (KINDS, HERE, OFFERS, [SHARED_MEMORY, TCP]),
        (KINDS, THERE, OFFERS, [TCP]),
        ((TCP,), HERE, OFFERS, [TCP]),
        ((MOONCAKE, TCP), HERE, OFFERS, [MOONCAKE, TCP]),
        ((TCP, MOONCAKE), HERE, OFFERS, [TCP, MOONCAKE]),
        ((SHARED_MEMORY,), THERE, OFFERS, []),
        ((TCP_TLS,), HERE, OFFERS, []),
        (KINDS, HERE, (), [TCP]),
        ((SHARED_MEMORY,), HERE, (), []),
    ],
    ids=[
        "one host", "two hosts", "forced", "first of the list", "order", "forbidden",
        "no plaintext", "an older receiver", "an older receiver, no tcp",
    ],
)  # fmt: skip
def test_the_senders_list_decides_among_what_the_receiver_offers(
    kinds: tuple[str, ...], host: str, offers: tuple[Offer, ...], expected: list[str]
) -> None:
    found = ways(wanted(offers), kinds, host)
    assert [one.kind for one in found] == expected
    assert all(one.host in ("", host) for one in found)


class Carrying:
    """Notes where it was sent, and fails when it is to."""

    def __init__(self, kind: str, calls: list[tuple[str, str]], *, fails: bool = False) -> None:
        self._kind, self._calls, self._fails = kind, calls, fails

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        self._calls.append((self._kind, ticket.endpoints[0].address))
        if self._fails:
            raise TransferFailed(f"{self._kind} does not come about")
        return TcpShipment(stall_s=1.0, failed=failed)


def opened(
    carriers: dict[str, Carrying], offers: tuple[Offer, ...] = OFFERS
) -> Shipment | TransferFailed:
    ticket = Ticket(new_ticket_id(), 1, 30.0, (wanted(offers),))

    async def go() -> Shipment | TransferFailed:
        try:
            return await ChoosingCarrier(carriers, HERE).open(ticket, MODEL, lambda _: None)
        except TransferFailed as error:
            return error

    return asyncio.run(go())


def test_a_way_that_does_not_come_about_is_followed_by_the_next() -> None:
    calls: list[tuple[str, str]] = []
    first = Carrying(SHARED_MEMORY, calls, fails=True)
    assert not isinstance(opened({SHARED_MEMORY: first, TCP: Carrying(TCP, calls)}), TransferFailed)
    assert calls == [(SHARED_MEMORY, "@name"), (TCP, "10.0.0.1:1")]


def test_the_last_way_tells_why_it_failed_and_none_tells_what_there_is() -> None:
    calls: list[tuple[str, str]] = []
    failed = opened({TCP: Carrying(TCP, calls, fails=True)})
    assert str(failed) == "tcp does not come about"
    none = opened({TCP_TLS: Carrying(TCP_TLS, calls)})
    assert "takes mooncake, pigeons, shared_memory, tcp; this node sends by tcp+tls" in str(none)


@pytest.mark.parametrize(
    ("sends", "receives", "expected"),
    [
        (KINDS, KINDS, OneSidedShipment),
        ((TCP, SHARED_MEMORY), KINDS, TcpShipment),
        ((TCP,), KINDS, TcpShipment),
        (KINDS, (TCP,), TcpShipment),
        ((SHARED_MEMORY,), (TCP,), None),
    ],
)
def test_two_nodes_of_one_host_find_their_way(
    sends: tuple[str, ...], receives: tuple[str, ...], expected: type | None
) -> None:
    assert transfer(sends, receives) == expected


def test_certificates_keep_tcp_out_of_the_clear() -> None:
    tls = self_made()
    assert transfer((TCP,), (TCP,), tls, tls) is TcpShipment
    assert transfer((TCP,), (TCP,), None, tls) is None
    assert transfer((TCP,), (TCP,), tls, None) is None
    with pytest.raises(ConfigError, match="cannot encrypt"):
        transfer((TCP,), (TCP, MOONCAKE), tls, tls)


def test_a_node_is_dialled_by_the_name_that_its_certificate_has() -> None:
    tls = self_made("localhost")
    assert transfer((TCP,), (TCP,), tls, tls, host="localhost", catch=False) is TcpShipment
    with pytest.raises(TransferFailed, match="cannot be reached"):
        transfer((TCP,), (TCP,), tls, tls, catch=False)


def test_a_stranger_with_another_certificate_is_not_believed() -> None:
    ours, others = self_made(), Tls(self_made().server, ssl.create_default_context())
    with pytest.raises(TransferFailed, match="cannot be reached"):
        transfer((TCP,), (TCP,), others, ours, catch=False)


def test_whoever_is_served_by_the_second_way_hears_of_an_abort() -> None:
    async def go() -> None:
        with ExitStack() as stack:
            source = source_memory(stack)
            reader = Ways("127.0.0.1", (TCP,), clock=time.monotonic)
            stack.callback(reader.close)
            writer = Ways("127.0.0.1", KINDS, clock=time.monotonic)
            stack.callback(writer.close)
            ends = endpoints({0: GEOMETRY}, writer.landing.address, ({3: 0}, {}))
            ticket = Ticket(new_ticket_id(), 1, 30.0, tuple(ends))
            incoming = Incoming(ticket, MODEL, now=time.monotonic())
            place = memoryview(bytearray(GEOMETRY.groups[0].block_bytes))
            writer.landing.expect(Arrival(incoming, {PieceKey(0, 0, 3): place}, lambda: None))
            told: asyncio.Future[TransferFailed] = asyncio.get_running_loop().create_future()
            shipment = await reader.carrier(source).open(ticket, MODEL, told.set_result)
            incoming.fail(Failure.ABORTED)
            writer.landing.withdraw(incoming)
            async with asyncio.timeout(30):
                assert "aborted" in (await told).message
            await shipment.close()

    asyncio.run(go())


def test_an_older_sender_knows_the_address_alone() -> None:
    """It drops what it does not know of a ticket."""
    assert transfer(KINDS, KINDS, older=True) is TcpShipment


def transfer(
    sends: tuple[str, ...],
    receives: tuple[str, ...],
    sender_tls: Tls | None = None,
    receiver_tls: Tls | None = None,
    *,
    host: str = "127.0.0.1",
    older: bool = False,
    catch: bool = True,
) -> type | None:
    """One block from a node to another; by what kind of shipment, None when there is no way."""

    async def go() -> type | None:
        with ExitStack() as stack:
            source = source_memory(stack)
            reader = Ways("127.0.0.1", sends, clock=time.monotonic, tls=sender_tls)
            stack.callback(reader.close)
            writer = Ways(host, receives, clock=time.monotonic, tls=receiver_tls)
            stack.callback(writer.close)
            landing = writer.landing
            geometries = {0: GEOMETRY}
            fill: tuple[dict[int, int], ...] = ({3: 0}, {})
            ends = endpoints(geometries, landing.address, fill, landing.offers)
            ticket = Ticket(new_ticket_id(), 1, 30.0, tuple(ends))
            incoming = Incoming(ticket, MODEL, now=time.monotonic())
            place = memoryview(bytearray(GEOMETRY.groups[0].block_bytes))
            key = PieceKey(0, 0, 3)
            landing.expect(Arrival(incoming, {key: place}, lambda: None))
            carrier = reader.carrier(source)
            if older:
                bare = tuple(replace(one, offers=()) for one in ticket.endpoints)
                ticket, carrier = replace(ticket, endpoints=bare), TcpCarrier()
            try:
                shipment = await carrier.open(ticket, MODEL, lambda _: None)
            except TransferFailed:
                if not catch:
                    raise
                return None
            piece = source.piece(key, 5, source.runs_for(ticket.endpoints[0]))
            await shipment.send([piece])
            await shipment.finish(1)
            await shipment.close()
            assert incoming.phase is Phase.READY
            assert bytes(place) == bytes(source.block(0, 0, 5))
            return type(shipment)

    return asyncio.run(go())


def test_a_machine_without_shared_memory_does_with_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "supported", lambda: False)
    assert transfer(KINDS, KINDS) is TcpShipment
    with pytest.raises(ConfigError, match="none of the transports shared_memory"):
        transfer((SHARED_MEMORY,), KINDS)


def test_a_node_without_mooncakes_engine_says_so_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    check(KINDS)
    with pytest.raises(ConfigError, match=r"transport mooncake: .*\[mooncake\]"):
        check((TCP, MOONCAKE))


class RawEngine:
    """Mooncake's, as far as it registers: nothing may be registered twice."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, size: int) -> int:
        apart = all(address + size <= a or a + s <= address for a, s in self.registered)
        self.registered.append((address, size))
        return 0 if apart else -1


def test_a_node_of_several_pools_shows_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RawEngine()
    monkeypatch.setattr(mooncake, "start", lambda host: raw)

    async def go() -> None:
        with ExitStack() as stack:
            ways = Ways("127.0.0.1", (SHARED_MEMORY, TCP, MOONCAKE), clock=time.monotonic)
            stack.callback(ways.close)
            for _ in range(2):
                ways.carrier(source_memory(stack))
            assert len(raw.registered) == 3, "the words, and each pool"
            kinds = [offer.kind for offer in ways.landing.offers]
            assert kinds == [SHARED_MEMORY, TCP, MOONCAKE]
            assert ways.landing.address == ways.landing.offers[1].address

    asyncio.run(go())
