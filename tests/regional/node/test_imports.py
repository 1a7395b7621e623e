"""The order in which an import ends, with a host that takes its time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field

import pytest

from core.engine import messages as m
from core.engine.lending_messages import Adopt, Import
from core.kv.handoff import Failure
from core.kv.ticket import Endpoint, Ticket
from regional.node.answer import Transfer
from regional.node.imports import NOTHING, Imports, Want
from regional.node.pool import Pool
from regional.node.receiving import Blocks, Fill, Receiving
from tests.regional.node.desk import Desk

TOKENS = tuple(range(100))


@dataclass
class SlowShare:
    """A share on another host: says when it listens, and when it has stopped writing."""

    changed: Callable[[], None]
    expected: bool = False
    ready: bool = False
    failure: Failure | None = None
    first_missing: int | None = 2
    transfer: Transfer = NOTHING
    then: Callable[[], None] | None = None

    def take(self) -> Transfer:
        return Transfer(bytes=7)

    def end(self, then: Callable[[], None]) -> None:
        self.then = then


class SlowHost:
    def __init__(self) -> None:
        self.shares: list[SlowShare] = []

    def endpoints(self, fill: Fill) -> Iterable[Endpoint]:
        return [Endpoint(0, "there:1", 0, 1, 1, "uint8", 64, tuple(fill[0]))]

    async def overwrite(self, blocks: Blocks) -> None:
        raise AssertionError("nothing is purged here")

    def reserve(self, ticket: Ticket, fill: Fill, changed: Callable[[], None]) -> SlowShare:
        self.shares.append(SlowShare(changed))
        return self.shares[-1]


@dataclass
class Recorder:
    """A rank that does nothing."""

    commands: list[m.Command] = field(default_factory=list)

    def send(self, command: m.Command) -> None:
        self.commands.append(command)


class Bench:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.rank, self.host, self.desk = Recorder(), SlowHost(), Desk()
        pool = Pool(0, self.rank, None, Receiving([self.host], 30.0))  # type: ignore[arg-type] # nothing is sent
        spec = m.SequenceSpec(token_ids=TOKENS, max_tokens=1)
        self.ended = 0
        self.computed: list[Transfer] = []
        self.imports = Imports(tasks, itertools.count(1), tier=None, ended=self._note)
        self.want = Want("r.1", pool, spec, self.desk, pull_tokens=96, pull_s=30.0)

    def _note(self) -> None:
        self.ended += 1

    async def begun(self) -> tuple[asyncio.Task[None], SlowShare]:
        """As far as the host's being asked."""
        task = self.imports.before(self.want, self.computed.append)
        assert task is not None
        await asyncio.sleep(0)
        (command,) = self.rank.commands
        assert isinstance(command, Import)
        assert command.token_ids == TOKENS[:96]
        fill = ({n: n for n in range(6)},)
        assert self.imports.reserved(
            m.Reserved(sequence=command.sequence, cached_tokens=0, fill=fill)
        )
        await turns()
        return task, self.host.shares[0]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def on_a_bench(test: Callable[[Bench], Coroutine[object, object, None]]) -> None:
    async def go() -> None:
        async with asyncio.TaskGroup() as tasks:
            bench = Bench(tasks)
            await test(bench)
            assert len(bench.imports) == 0
            assert bench.ended == 1

    asyncio.run(go())


def test_the_ticket_is_given_when_all_hosts_listen_and_the_rank_adopts_what_came() -> None:
    async def test(bench: Bench) -> None:
        task, share = await bench.begun()
        assert not bench.desk.of("pulling")
        share.expected = True
        share.changed()
        await turns()
        assert len(bench.desk.of("pulling")) == 1
        assert not bench.computed
        share.ready = True
        share.changed()
        await task
        assert bench.rank.commands[1:] == [Adopt(bench.rank.commands[0].sequence, 96)]  # type: ignore[union-attr] # an Import
        assert [one.bytes for one in bench.computed] == [7]

    on_a_bench(test)


@pytest.mark.parametrize("how", ["failed", "proceed", "cancelled"])
def test_blocks_are_given_back_only_when_the_host_has_stopped_writing(how: str) -> None:
    async def test(bench: Bench) -> None:
        task, share = await bench.begun()
        share.expected = True
        match how:
            case "failed":
                share.failure = Failure.PEER_LOST
                share.changed()
            case "proceed":
                bench.imports.proceed("another")
                await turns()
                assert share.then is None
                bench.imports.proceed("r.1")
            case _:
                task.cancel()
        await asyncio.wait([task])
        assert bool(bench.computed) == (how != "cancelled")
        assert len(bench.rank.commands) == 1, "it may still write"
        assert share.then is not None
        share.then()
        assert bench.rank.commands[1:] == [Adopt(bench.rank.commands[0].sequence, 32)]  # type: ignore[union-attr] # an Import

    on_a_bench(test)


def test_a_rank_that_refuses_is_not_asked_again() -> None:
    async def test(bench: Bench) -> None:
        task = bench.imports.before(bench.want, bench.computed.append)
        assert task is not None
        await asyncio.sleep(0)
        (command,) = bench.rank.commands
        assert isinstance(command, Import)
        bench.imports.failed(m.SequenceFailed(command.sequence, "no_capacity", "full"))
        await task
        assert bench.computed == [NOTHING]
        assert bench.rank.commands[1:] == [m.Abort(command.sequence)]

    on_a_bench(test)
