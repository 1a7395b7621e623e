"""KV that a reader fetches from another node before it computes the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from xxhash import xxh3_64_intdigest

from core.engine import messages as m
from core.engine.lending_messages import Adopt, Import
from core.engine.plan import SequenceId
from core.errors import TransferFailed
from core.events import Moved
from core.kv.ticket import Ticket, model_digest
from core.kv.transports.base import SHARED_MEMORY, TCP, Piece, Shipment
from core.kv.transports.tcp_send import TcpCarrier, TcpShipment
from core.kv.transports.tcp_wire import encode_piece
from regional.node import wire
from regional.node.seams import Outbox
from regional.pb import node_pb2 as pb
from tests.regional.node.little import LittleRegion, little_region, send_as_it_is
from tests.regional.node.little_parts import cached_of, direct, ids_of, pulling, split

PROMPT = "".join(chr(97 + n * n % 26) for n in range(150))
OTHER = "".join(chr(97 + n * 7 % 26) for n in range(150))
BLOCK = 1024
Test = Callable[[LittleRegion], Awaitable[None]]


def in_a_region(
    test: Test,
    *,
    window: int = 0,
    shards: dict[str, int] | None = None,
    blocks: int = 64,
    lease_s: float = 5.0,
    transport: str = TCP,
) -> None:
    """`test` with two decode nodes, `s` and `d`, and a prefill node; then all must be at home."""

    async def go() -> None:
        async with little_region(
            ("s", "decode"), ("d", "decode"), ("p", "prefill"),
            window=window, shards=shards, blocks=blocks, lease_s=lease_s, transport=transport,
        ) as region:  # fmt: skip
            await test(region)

    asyncio.run(go())


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("shards", [{}, {"s": 2}, {"d": 2}], ids=["1-1", "2-1", "1-2"])
def test_a_decode_node_pulls_a_prefix_and_computes_the_rest(
    window: int, shards: dict[str, int]
) -> None:
    async def test(region: LittleRegion) -> None:
        fresh = await region.answer(PROMPT, direct("s"))
        assert cached_of(fresh) == 0
        pulled = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert ids_of(pulled) == ids_of(fresh)
        assert cached_of(pulled) == 144
        moved = (9 + (3 if window else 0)) * BLOCK
        assert region.nodes["d"].front.kv_bytes_received == moved
        assert region.nodes["s"].front.kv_bytes_sent == moved
        again = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert cached_of(again) == 144
        assert region.nodes["d"].front.kv_bytes_received == moved, "nothing was lacking"

    in_a_region(test, window=window, shards=shards)


@pytest.mark.parametrize("source", ["d", "s"])
def test_a_prefill_node_pulls_the_history_and_hands_over_what_is_lacking(source: str) -> None:
    async def test(region: LittleRegion) -> None:
        await region.answer(PROMPT[:100], direct(source))  # 6 blocks
        events = await region.answer(PROMPT, split("p", "d", pulling(source, 6)))
        assert cached_of(events) == 96
        assert region.nodes["p"].front.kv_bytes_received == 6 * BLOCK
        lacking = 4 if source == "d" else 10
        assert region.nodes["p"].front.kv_bytes_sent == lacking * BLOCK
        assert ids_of(events) == ids_of(await region.answer(PROMPT, direct("p")))

    in_a_region(test)


@pytest.mark.parametrize("transport", [TCP, SHARED_MEMORY])
def test_what_the_source_lacks_is_computed_and_what_it_has_is_kept(transport: str) -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("p")))
        await region.answer(PROMPT[:70], direct("s"))  # 4 blocks
        events = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert ids_of(events) == fresh
        assert cached_of(events) == 64
        assert region.nodes["s"].front.kv_bytes_sent == 4 * BLOCK

    in_a_region(test, transport=transport)


def test_a_source_that_has_nothing_costs_nothing() -> None:
    async def test(region: LittleRegion) -> None:
        events = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert cached_of(events) == 0
        assert not any("open" in one for one in region.steps.labels)
        assert any("proceed" in one for one in region.steps.labels)

    in_a_region(test)


def test_a_start_of_a_window_is_of_no_use() -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("p")))
        await region.answer(PROMPT[:70], direct("s"))
        events = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert ids_of(events) == fresh
        assert cached_of(events) == 0
        assert not any("open" in one for one in region.steps.labels)

    in_a_region(test, window=40)


def test_the_ticket_of_a_hand_off_lives_as_long_as_the_pull_before_it() -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))

        async def slowly(shipment: Shipment, piece: Piece) -> None:
            await asyncio.sleep(0.3)  # nine: nearly two leases; the time is what is under test
            await shipment.send([piece])

        region.nodes["s"].meddle = slowly
        plan = pulling("s", 9, patience_s=60.0)
        events = await region.answer(PROMPT, split("p", "d", plan))
        assert ids_of(events) == fresh
        assert cached_of(events) == 144
        assert len([one for one in events if isinstance(one, Moved)]) == 0

    in_a_region(test, lease_s=1.5)


def test_a_silent_source_is_not_waited_for() -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))
        region.nodes["s"].freeze()
        events = await region.answer(PROMPT, direct("d", pulling("s", 9, patience_s=0.05)))
        assert ids_of(events) == fresh
        assert cached_of(events) == 0

    in_a_region(test)


def test_the_router_lets_a_prefill_node_pull_what_the_decode_node_has() -> None:
    """Placed by nobody but the router: the history is where the last turn was answered."""

    async def test(region: LittleRegion) -> None:
        first = await region.answer(PROMPT[:60])
        await region.settled()
        events = await region.answer(PROMPT)
        assert [type(one) for one in region.nodes["p"].rank.commands].count(Import) == 1
        assert region.nodes["p"].front.kv_bytes_received > 0
        assert ids_of(events) == ids_of(await region.answer(PROMPT, direct("p")))
        assert cached_of(events) == 48 > cached_of(first)

    in_a_region(test)


@pytest.mark.parametrize("pull", [False, True], ids=["hand-off", "pull"])
def test_a_slow_endpoint_holds_up_the_beginning_and_nothing_is_read_before(pull: bool) -> None:
    """Ranks of the decode node on two hosts: the second one's last piece comes late."""

    async def go() -> None:
        async with little_region(
            ("s", "decode"), ("d", "decode"), ("p", "prefill"), shards={"d": 2}, apart=True
        ) as region:
            fresh = ids_of(await region.answer(PROMPT, direct("s")))
            decode, sender = region.nodes["d"], region.nodes["s" if pull else "p"]
            released, waiting = asyncio.Event(), asyncio.Event()

            async def slow(shipment: Shipment, piece: Piece) -> None:
                if piece.key.rank == 1 and piece.key.block == 8:
                    waiting.set()
                    await released.wait()
                await shipment.send([piece])

            sender.meddle = slow
            placed = direct("d", pulling("s", 9)) if pull else split("p", "d")
            asking = asyncio.create_task(region.answer(PROMPT, placed))
            await waiting.wait()
            for _ in range(50):
                await asyncio.sleep(0)
            begun = (Adopt, m.Run) if pull else (m.Begin,)
            assert not [one for one in decode.rank.commands if isinstance(one, begun)]
            released.set()
            assert ids_of(await asking) == fresh
            assert [one for one in decode.rank.commands if isinstance(one, begun)]

    asyncio.run(go())


async def damage(shipment: Shipment, piece: Piece) -> None:
    """Arrives whole, with another content than was checked."""
    if piece.key.block < 4:
        await shipment.send([piece])
        return
    content = bytearray(b"".join(piece.parts))
    head = encode_piece(piece.key, piece.size, xxh3_64_intdigest(content))
    content[5] ^= 1
    assert isinstance(shipment, TcpShipment)
    (stream,) = shipment._streams
    await stream.send([memoryview(head), memoryview(content)])


async def cut(shipment: Shipment, piece: Piece) -> None:
    if piece.key.block < 4:
        await shipment.send([piece])
    else:
        await shipment.close()
        raise TransferFailed("cut by the test")


@pytest.mark.parametrize("meddle", [damage, cut])
def test_a_pull_that_breaks_keeps_what_was_verified_and_nothing_else(
    meddle: Callable[[Shipment, Piece], Awaitable[None]],
) -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))
        region.nodes["s"].meddle = meddle
        events = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert ids_of(events) == fresh
        assert cached_of(events) == 64

    in_a_region(test)


@pytest.mark.parametrize("meddle", [damage, cut])
def test_a_pull_that_breaks_on_its_way_to_a_prefill_node(
    meddle: Callable[[Shipment, Piece], Awaitable[None]],
) -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))
        await region.answer(PROMPT[:100], direct("d"))
        region.nodes["s"].meddle = meddle
        events = await region.answer(PROMPT, split("p", "d", pulling("s", 9)))
        assert ids_of(events) == fresh
        assert cached_of(events) == 64

    in_a_region(test)


def test_what_is_being_sent_is_not_given_to_others() -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))
        source = region.nodes["s"]

        async def crowd(shipment: Shipment, piece: Piece) -> None:
            if piece.key.block == 4:  # others take every block of the source that can be had
                for number in range(4):
                    await region.answer(OTHER[number:] * 3, direct("s"), max_tokens=2)
            await shipment.send([piece])

        source.meddle = crowd
        events = await region.answer(PROMPT, direct("d", pulling("s", 9)))
        assert ids_of(events) == fresh
        assert cached_of(events) == 144
        source.meddle = send_as_it_is
        for number in range(4):
            await region.answer(OTHER[number:] * 3, direct("s"), max_tokens=2)
        assert cached_of(await region.answer(PROMPT, direct("s"))) == 0, "it was crowded indeed"

    in_a_region(test, blocks=40)


def test_an_old_ticket_is_worth_nothing() -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))
        tickets: list[Ticket] = []
        source = region.nodes["s"]
        real = source.front.handle

        def handle(message: pb.RouterMessage, outbox: Outbox) -> None:
            if message.HasField("send"):
                tickets.append(wire.ticket(message.send.ticket))
            real(message, outbox)

        source.front.handle = handle  # type: ignore[method-assign] # to overhear the ticket
        assert ids_of(await region.answer(PROMPT, direct("d", pulling("s", 9)))) == fresh
        (ticket,) = tickets
        with pytest.raises(TransferFailed, match="ticket"):
            await TcpCarrier().open(
                ticket, model_digest(source.rank.fingerprint), lambda error: None
            )
        assert ids_of(await region.answer(PROMPT, direct("d"))) == fresh

    in_a_region(test)


def test_a_full_pool_pulls_nothing_and_answers_all_the_same() -> None:
    async def test(region: LittleRegion) -> None:
        fresh = ids_of(await region.answer(PROMPT, direct("s")))
        full = region.nodes["d"].rank
        for number in range(4):  # 36 of 40 blocks, reserved by nobody who will ever begin
            full.send(Import(sequence=SequenceId(f"x{number}"), token_ids=(number,) * 144))
        events = await region.answer(PROMPT, split("p", "d", pulling("s", 9)))
        assert ids_of(events) == fresh
        for number in range(4):
            full.send(m.Abort(SequenceId(f"x{number}")))

    in_a_region(test, blocks=40)


def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async def test(region: LittleRegion) -> None:
        await region.answer(PROMPT, direct("s"))
        source = region.nodes["s"]
        reached = asyncio.Event()

        async def stall(shipment: Shipment, piece: Piece) -> None:
            await shipment.send([piece])
            if piece.key.block == 4:
                reached.set()
                await asyncio.Event().wait()

        source.meddle = stall
        asking = asyncio.create_task(region.answer(PROMPT, direct("d", pulling("s", 9))))
        await reached.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await region.settled()
        source.meddle = send_as_it_is
        assert cached_of(await region.answer(PROMPT, direct("d"))) >= 64, "what had come is kept"

    in_a_region(test)
