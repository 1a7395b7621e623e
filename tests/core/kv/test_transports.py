"""Every transport through the same seam."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from core.errors import TransferFailed
from core.kv.handoff import Failure, Phase
from core.kv.ticket import PieceKey, Ticket, model_digest, new_ticket_id
from tests.core.kv.receivers import (
    GEOMETRY,
    KINDS,
    MODEL,
    WAIT_S,
    phase_of,
    receiver,
    send_all,
    whole,
)

every = pytest.mark.parametrize("kind", KINDS)


@every
def test_blocks_arrive_as_they_were_and_nothing_else_is_touched(kind: str) -> None:
    async def go() -> None:
        async with receiver(kind) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            pieces = side.pieces()
            await shipment.send(pieces[:2])
            await shipment.renew()
            await shipment.send(pieces[2:])
            await shipment.finish(77)
            await shipment.close()
            assert side.settled.is_set()
            assert phase_of(side.incoming) is Phase.READY
            assert side.incoming.computed_tokens == 77
            assert not side.failed
            expected = bytearray(GEOMETRY.pool_bytes)
            for piece in pieces:
                start, end = GEOMETRY.block_span(piece.key.group, 40 + piece.key.block)
                expected[start:end] = whole(piece)
                assert side.received(piece.key) == whole(piece)
            assert side.memory == expected

    asyncio.run(go())


@every
def test_an_abort_between_blocks_stops_the_writing_and_tells_the_sender(kind: str) -> None:
    async def go() -> None:
        async with receiver(kind) as side:
            told = asyncio.Event()

            def failed(error: TransferFailed) -> None:
                side.failed.append(error)
                told.set()

            shipment = await side.carrier.open(side.ticket, MODEL, failed)
            pieces = side.pieces()
            await shipment.send(pieces[:1])
            async with asyncio.timeout(WAIT_S):
                while side.incoming.missing == len(pieces):
                    await asyncio.sleep(0)
            side.incoming.fail(Failure.ABORTED)
            side.landing.withdraw(side.incoming)
            before = bytes(side.memory)
            async with asyncio.timeout(WAIT_S):
                await told.wait()
            with pytest.raises(TransferFailed):
                await shipment.send(pieces[1:])
            await shipment.close()
            assert bytes(side.memory) == before
            assert "aborted" in str(side.failed[0])
            assert not side.settled.is_set(), "who aborts need not be told"

    asyncio.run(go())


@every
def test_a_sender_that_leaves_early_fails_the_transfer(kind: str) -> None:
    async def go() -> None:
        async with receiver(kind) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            await shipment.send(side.pieces()[:1])
            await shipment.close()
            async with asyncio.timeout(WAIT_S):
                await side.settled.wait()
            assert side.incoming.failure is Failure.PEER_LOST

    asyncio.run(go())


@every
def test_a_foreign_piece_is_refused_by_name(kind: str) -> None:
    async def go() -> None:
        async with receiver(kind) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            foreign = side.piece(PieceKey(0, 0, 7), 0)
            with pytest.raises(TransferFailed, match="piece"):
                await send_all(shipment, [foreign])
            await shipment.close()
            async with asyncio.timeout(WAIT_S):
                await side.settled.wait()
            assert not any(side.memory)

    asyncio.run(go())


@every
@pytest.mark.parametrize("wrong", ["generation", "id", "model"])
def test_a_wrong_ticket_is_refused_and_the_right_one_still_works(kind: str, wrong: str) -> None:
    async def go() -> None:
        async with receiver(kind) as side:
            good = side.ticket
            forged = Ticket(
                id=new_ticket_id() if wrong == "id" else good.id,
                generation=4 if wrong == "generation" else good.generation,
                lease_s=good.lease_s,
                endpoints=good.endpoints,
            )
            model = model_digest(b"another") if wrong == "model" else MODEL
            with pytest.raises(TransferFailed, match="refused: ticket"):
                await side.carrier.open(forged, model, side.failed.append)
            assert phase_of(side.incoming) is Phase.RESERVED
            shipment = await side.carrier.open(good, MODEL, side.failed.append)
            with pytest.raises(TransferFailed, match="refused: taken"):
                await side.carrier.open(good, MODEL, side.failed.append)
            await shipment.send(side.pieces())
            await shipment.finish(1)
            await shipment.close()
            assert phase_of(side.incoming) is Phase.READY

    asyncio.run(go())


@every
@pytest.mark.parametrize("who", ["owner", "stranger"])
def test_a_hello_that_finds_the_lease_run_out_tells_the_receiver(kind: str, who: str) -> None:
    """Whoever notices the end must say so: the receiver's own timer finds nothing left to do."""

    async def go() -> None:
        now = [0.0]
        async with receiver(kind, clock=lambda: now[0]) as side:
            ticket = side.ticket if who == "owner" else replace(side.ticket, id=new_ticket_id())
            now[0] = 31.0
            with pytest.raises(TransferFailed, match="refused"):
                await side.carrier.open(ticket, MODEL, side.failed.append)
            assert side.incoming.failure is Failure.EXPIRED
            assert side.settled.is_set()

    asyncio.run(go())


@every
def test_a_lease_that_has_run_out_refuses_the_next_piece(kind: str) -> None:
    async def go() -> None:
        now = [0.0]
        async with receiver(kind, clock=lambda: now[0]) as side:
            shipment = await side.carrier.open(side.ticket, MODEL, side.failed.append)
            now[0] = 31.0
            with pytest.raises(TransferFailed, match="expired"):
                await send_all(shipment, side.pieces())
            await shipment.close()
            assert side.settled.is_set()
            assert side.incoming.failure is Failure.EXPIRED
            assert not any(side.memory)

    asyncio.run(go())
