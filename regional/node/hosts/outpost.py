"""A node's process on a host that is not its first: ranks, their memory, a line to the front."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from core.errors import NodeLost
from core.kv.shards import PoolMemory
from core.kv.ticket import Ticket, model_digest
from core.kv.transports.base import BlockMemory, Landing
from core.kv.transports.ways import Tls, Ways
from core.parallel import Hosts, Plan
from core.tls import Credentials, kept_fresh
from regional.node.hosts.messages import (
    Expect,
    Expecting,
    FrontMessage,
    Lost,
    Overwrite,
    Overwritten,
    Present,
    Rank,
    Settled,
    Stop,
    Take,
    Withdraw,
    Withdrawn,
)
from regional.node.hosts.wire import Line
from regional.node.rank_link import Loaded
from regional.node.ranks import Ranks
from regional.node.receiving import OwnHost, OwnShare
from regional.node.stopping import Stopping

log = logging.getLogger("skerry.node")

EXIT_LOST = 1
_RETRY_S = 0.1
_DIAL_S = 600.0


async def run(
    node: str,
    hosts: Hosts,
    ranks: Ranks,
    stop: Stopping,
    transports: Sequence[str],
    credentials: Credentials | None,
) -> int:
    """From the start of `ranks` to the end of the node; the exit status. Does not close `ranks`.
    Raises ConfigError."""
    try:
        loaded = await stop.unless_stopped(ranks.ready())
        line = await stop.unless_stopped(_dial(hosts)) if loaded else None
    except NodeLost as error:
        log.error("%s", error)
        return EXIT_LOST
    if loaded is None or line is None:
        return 0
    by_rank = dict(zip(hosts.ranks(ranks.plan), loaded, strict=True))
    ways = Ways(line.here, transports, clock=time.monotonic, tls=Tls.of(credentials))
    landing = ways.landing
    desk = Desk(line.send, own_hosts(ranks.plan, by_rank, landing))
    line.take = desk.take
    try:
        line.send(
            Present(
                host=hosts.index,
                secret=hosts.secret,
                address=landing.address,
                offers=landing.offers,
                ranks=tuple(
                    Rank(rank, link.pid, one.ready)
                    for (rank, one), link in zip(by_rank.items(), ranks.links, strict=True)
                ),
            )
        )
        log.info("host %d of node %s serves", hosts.index, node)
        async with kept_fresh(credentials):
            return await _until_the_end(node, line, desk, ranks, stop)
    finally:
        ways.close()
        await line.close()


async def _until_the_end(
    node: str, line: Line[FrontMessage], desk: Desk, ranks: Ranks, stop: Stopping
) -> int:
    gone = asyncio.create_task(line.run())
    lost = asyncio.create_task(ranks.lost())
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({gone, lost, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done() or desk.stopped:
            return 0
        if gone.done():
            log.error("the first host of node %s %s", node, gone.result())
            return EXIT_LOST
        log.error("%s", lost.result())
        line.send(Lost(str(lost.result())))
        return EXIT_LOST
    finally:
        for task in (gone, lost, asked):
            task.cancel()


async def _dial(hosts: Hosts) -> Line[FrontMessage]:
    """Raises NodeLost when the first host does not come."""
    until = time.monotonic() + _DIAL_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(hosts.address, hosts.port + 1)
        except OSError as error:
            if time.monotonic() > until:
                raise NodeLost(
                    f"the first host is not at {hosts.address}:{hosts.port + 1}: {error}"
                ) from error
            await asyncio.sleep(_RETRY_S)
        else:
            return Line[FrontMessage](reader, writer, FrontMessage)


def own_hosts(plan: Plan, loaded: Mapping[int, Loaded], landing: Landing) -> dict[int, OwnHost]:
    """The memory of each pool's ranks among `loaded`."""
    found: dict[int, OwnHost] = {}
    for pool in range(plan.dp_attention):
        members = [rank for rank in plan.members(pool) if rank in loaded]
        if members:
            memory = PoolMemory(
                {
                    rank: BlockMemory(one.ready.geometry, one.memory, one.descriptor)
                    for rank, one in loaded.items()
                    if rank in members
                }
            )
            model = model_digest(loaded[members[0]].ready.fingerprint)
            found[pool] = OwnHost(memory, landing, model, time.monotonic)
    return found


class Desk:
    """Does what the front says. `stopped`: the node closes on purpose."""

    def __init__(self, say: Callable[[OutpostSaid], None], hosts: Mapping[int, OwnHost]) -> None:
        self.stopped = False
        self._say = say
        self._hosts = hosts
        self._shares: dict[int, OwnShare] = {}

    def take(self, message: FrontMessage) -> None:
        match message:
            case Expect():
                self._expect(message)
            case Take(generation):
                share = self._shares.pop(generation, None)
                if share is not None:
                    share.take()
            case Withdraw(generation):
                share = self._shares.pop(generation, None)
                if share is not None:
                    share.end(lambda: None)
                self._say(Withdrawn(generation))
            case Overwrite(pool, blocks):
                self._hosts[pool].blank(blocks)
                self._say(Overwritten(pool))
            case Stop():
                self.stopped = True

    def _expect(self, message: Expect) -> None:
        host = self._hosts[message.pool]
        ends = host.endpoints(message.fill)
        ticket = Ticket(message.ticket_id, message.generation, message.lease_s, tuple(ends))
        generation = message.generation
        self._shares[generation] = host.reserve(
            ticket, message.fill, lambda: self._settled(generation)
        )
        self._say(Expecting(generation))

    def _settled(self, generation: int) -> None:
        share = self._shares[generation]
        done = share.transfer
        self._say(
            Settled(
                generation=generation,
                failure=share.failure,
                computed_tokens=done.computed_tokens,
                seconds=done.seconds,
                bytes=done.bytes,
            )
        )


OutpostSaid = Expecting | Settled | Withdrawn | Overwritten
