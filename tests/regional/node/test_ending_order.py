"""However a transfer ends, nothing reads or writes its blocks by the time that a rank may reuse
them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import pytest

from core.engine import messages as m
from core.engine.lending_messages import Held
from core.errors import NoCapacity, TransferFailed
from core.kv.handoff import Failure
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Ticket, new_ticket_id
from core.kv.transports.base import BlockMemory, Piece
from core.telemetry import SILENT
from core.types import BLOCK_TOKENS
from regional.node.errands import Job
from regional.node.imports import Imports, Want
from regional.node.notes import Notebook, Notes
from regional.node.pool import Pool
from regional.node.prefill import PrefillJob
from regional.node.receiving import Receiving
from regional.node.seams import Sending
from regional.node.send import SendJob
from tests.regional.node.desk import Desk, abort, reserve, work
from tests.regional.node.fake_rank import GEOMETRY
from tests.regional.node.fakes import fake_node
from tests.regional.node.test_imports import SlowHost

MODEL = b"model"
BLOCKS = 2
TOKENS = tuple(range(BLOCKS * BLOCK_TOKENS))
ROWS = tuple(tuple(range(BLOCKS)) for _ in GEOMETRY.groups)


class Way:
    """Carrier and shipment in one, whose receiver `refuses` the end, or says nothing for ever. To
    close takes it a while."""

    def __init__(self, log: list[str], *, refuses: bool, silent: bool) -> None:
        self._log = log
        self._refuses = refuses
        self._silent = silent
        self.finishing = asyncio.Event()

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Way:
        return self

    async def send(self, pieces: Sequence[Piece]) -> None:
        return

    async def renew(self) -> None:
        return

    async def finish(self, computed_tokens: int) -> None:
        self.finishing.set()
        if self._refuses:
            raise TransferFailed("as the test asked")
        if self._silent:
            await asyncio.Event().wait()

    async def close(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self._log.append("closed")


class Listed:
    """A rank that does nothing."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def send(self, command: m.Command) -> None:
        self._log.append(type(command).__name__)


def notes(did: str) -> Notes:
    return Notebook("a", time.monotonic, SILENT).open(did, "a.1")


def sent(sending: Sending, ticket: Ticket, _: asyncio.TaskGroup) -> Job:
    job = SendJob(sending, "a.1", Desk(), TOKENS, "", ticket, notes("sent"))
    job.tell(Held(sequence=job.sequence, tokens=len(TOKENS), blocks=ROWS))
    return job


def read(sending: Sending, ticket: Ticket, tasks: asyncio.TaskGroup) -> Job:
    imports = Imports(tasks, itertools.count(1), tier=None, ended=lambda: None)
    pool = Pool(0, sending.rank, sending, Receiving([], 30.0))
    spec = m.SequenceSpec(token_ids=(*TOKENS, 1), max_tokens=1)
    job = PrefillJob(imports, Want("a.1", pool, spec, Desk()), ticket, notes("prefilled"))
    done = m.PrefillProgress(
        sequence=job.sequence,
        ready_tokens=len(TOKENS),
        computed_tokens=len(TOKENS),
        complete=True,
        blocks=ROWS,
    )
    job.tell(done)
    return job


@pytest.mark.parametrize("make", [sent, read])
@pytest.mark.parametrize("how", ["well", "refused", "cancelled"])
def test_the_carrier_is_closed_before_the_rank_hears_of_the_end(
    make: Callable[[Sending, Ticket, asyncio.TaskGroup], Job], how: str
) -> None:
    async def go() -> None:
        log: list[str] = []
        memory = PoolMemory({0: BlockMemory(GEOMETRY, bytearray(GEOMETRY.pool_bytes))})
        fill = tuple({n: n for n in range(BLOCKS)} for _ in GEOMETRY.groups)
        ends = tuple(endpoints(memory.geometries, "there:1", fill))
        ticket = Ticket(new_ticket_id(), 1, 30.0, ends)
        way = Way(log, refuses=how == "refused", silent=how == "cancelled")
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
            job = make(Sending(Listed(log), memory, way, MODEL, time.monotonic), ticket, tasks)
            running = asyncio.create_task(job.run(5.0))
            await way.finishing.wait()
            if how == "cancelled":
                running.cancel()
            await asyncio.wait({running})
        begin = "Hold" if make is sent else "Prefill"
        assert log == [begin, "closed", "Release" if how == "well" else "Abort"]
        assert running.cancelled() == (how == "cancelled")
        if how == "refused":
            assert isinstance(running.exception(), TransferFailed)

    asyncio.run(go())


def test_a_source_that_holds_nothing_opens_no_way() -> None:
    async def go() -> None:
        log: list[str] = []
        memory = PoolMemory({0: BlockMemory(GEOMETRY, bytearray(GEOMETRY.pool_bytes))})
        fill = tuple({n: n for n in range(BLOCKS)} for _ in GEOMETRY.groups)
        ends = tuple(endpoints(memory.geometries, "there:1", fill))
        way = Way(log, refuses=True, silent=False)
        sending = Sending(Listed(log), memory, way, MODEL, time.monotonic)
        ticket = Ticket("00", 1, 30.0, ends)
        job = SendJob(sending, "a.1", Desk(), TOKENS, "", ticket, notes("sent"))
        job.tell(NoCapacity("no place to look"))
        with pytest.raises(NoCapacity):
            await job.run(5.0)
        assert log == ["Hold", "Abort"]

    asyncio.run(go())


@pytest.mark.parametrize("how", ["abort", "session", "expired"])
def test_a_rank_forgets_a_reservation_when_every_host_has_stopped_writing(how: str) -> None:
    async def go() -> None:
        host = SlowHost()
        async with fake_node(elsewhere=[host]) as node:
            node.say(reserve("a.1", work(range(40))))
            while not host.shares:
                await asyncio.sleep(0)
            (share,) = host.shares
            match how:
                case "abort":
                    node.say(abort("a.1"))
                case "session":
                    node.front.session_closed(node.desk)
                    node.front.session_opened(node.desk)
                case _:
                    share.failure = Failure.EXPIRED
                    share.changed()
            assert share.then is not None
            assert node.rank.held == 1
            assert not [one for one in node.rank.commands if isinstance(one, m.Abort)]
            share.then()
            assert [type(one) for one in node.rank.commands] == [m.Reserve, m.Abort]
            assert node.rank.held == 0

    asyncio.run(go())
