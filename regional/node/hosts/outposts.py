"""The front's end: the outposts of its node, and what they receive of a transfer."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from core.errors import ConfigError, NodeLost
from core.kv.geometry import KVGeometry
from core.kv.handoff import Failure
from core.kv.shards import endpoints
from core.kv.ticket import Endpoint, Ticket
from core.parallel import Hosts, Plan
from regional.node.answer import Transfer
from regional.node.hosts.messages import (
    Expect,
    Expecting,
    Lost,
    OutpostMessage,
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
from regional.node.receiving import Blocks, Fill, in_turns

log = logging.getLogger("skerry.node")

HELLO_S = 600.0
"""An outpost may have to read weights before it speaks; it dials as soon as it has."""


class Outposts:
    """All outposts of a node. With one host there are none, and nothing of this happens."""

    def __init__(self, node: str, hosts: Hosts) -> None:
        self._node = node
        self._hosts = hosts
        self._server: asyncio.Server | None = None
        self._joined: dict[int, Outpost] = {}
        self._lines: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self._complete: asyncio.Future[None] = loop.create_future()
        self._lost: asyncio.Future[NodeLost] = loop.create_future()
        if hosts.count == 1:
            self._complete.set_result(None)

    @classmethod
    async def listen(cls, node: str, hosts: Hosts) -> Outposts:
        """On the first host. Raises ConfigError when the port above MASTER_PORT is taken."""
        outposts = cls(node, hosts)
        if hosts.count > 1 and hosts.index == 0:
            port = hosts.port + 1
            try:
                outposts._server = await asyncio.start_server(outposts._accept, hosts.address, port)
            except OSError as error:
                raise ConfigError(
                    f"{hosts.address}:{port} cannot be listened on: {error}"
                ) from error
        return outposts

    @property
    def ranks(self) -> list[Rank]:
        """Those of all other hosts."""
        return [rank for _, one in sorted(self._joined.items()) for rank in one.present.ranks]

    def of_pool(self, plan: Plan, pool: int) -> list[RemoteHost]:
        """The hosts that have ranks of a pool, each with these."""
        return [
            RemoteHost(one, pool, geometries)
            for _, one in sorted(self._joined.items())
            if (geometries := one.geometries(set(plan.members(pool))))
        ]

    async def ready(self) -> None:
        """Wait until all have joined. Raises NodeLost when one has gone again."""
        either: list[asyncio.Future[Any]] = [self._complete, self._lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            raise self._lost.result()

    async def lost(self) -> NodeLost:
        """Wait for the first that goes; the error says which and why, in one line."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """The node closes: so shall they."""
        for one in self._joined.values():
            one.line.send(Stop())
        for one in self._joined.values():
            await one.line.close()
        if self._server is not None:
            self._server.close()
        for task in self._lines:
            task.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._lines.add(task)
        task.add_done_callback(self._lines.discard)
        line = Line[OutpostMessage](reader, writer, OutpostMessage)
        try:
            async with asyncio.timeout(HELLO_S):
                present = await line.first()
        except TimeoutError:
            present = None
        if not isinstance(present, Present) or not self._welcome(present):
            await line.close()
            return
        outpost = self._joined[present.host] = Outpost(present, line)
        log.info("host %d of node %s has joined", present.host, self._node)
        if len(self._joined) == self._hosts.count - 1 and not self._complete.done():
            self._complete.set_result(None)
        how = await line.run()
        await line.close()
        if not self._lost.done():
            why = outpost.last_words or f"host {present.host} of node {self._node} {how}"
            self._lost.set_result(NodeLost(why))

    def _welcome(self, present: Present) -> bool:
        known = hmac.compare_digest(present.secret, self._hosts.secret)
        return known and 0 < present.host < self._hosts.count and present.host not in self._joined


class Outpost:
    """One that has joined; hears what its line brings."""

    def __init__(self, present: Present, line: Line[OutpostMessage]) -> None:
        self.present = present
        self.line = line
        self.last_words = ""
        self.shares: dict[int, RemoteShare] = {}
        self.overwriting: deque[asyncio.Future[None]] = deque()
        """What has been asked and not answered, in order."""
        line.take = self._take

    def geometries(self, members: set[int]) -> dict[int, KVGeometry]:
        ranks = self.present.ranks
        return {one.rank: one.ready.geometry for one in ranks if one.rank in members}

    def _take(self, message: OutpostMessage) -> None:
        if isinstance(message, Lost):
            self.last_words = message.message
        elif isinstance(message, Expecting | Settled | Withdrawn):
            share = self.shares.get(message.generation)
            if share is not None:
                share.hear(message)
        elif isinstance(message, Overwritten):
            self.overwriting.popleft().set_result(None)


class RemoteHost:
    """A `regional.node.receiving.Host`. `geometries`: of the pool's ranks there."""

    def __init__(self, outpost: Outpost, pool: int, geometries: Mapping[int, KVGeometry]) -> None:
        self._outpost = outpost
        self._pool = pool
        self._geometries = geometries

    def endpoints(self, fill: Fill) -> Iterable[Endpoint]:
        there = self._outpost.present
        return endpoints(self._geometries, there.address, fill, there.offers)

    def reserve(self, ticket: Ticket, fill: Fill, changed: Callable[[], None]) -> RemoteShare:
        share = RemoteShare(self._outpost, ticket, changed)
        if not ticket.empty:
            self._outpost.line.send(
                Expect(
                    pool=self._pool,
                    ticket_id=ticket.id,
                    generation=ticket.generation,
                    lease_s=ticket.lease_s,
                    fill=tuple(map(dict, fill)),
                )
            )
        return share

    async def overwrite(self, blocks: Blocks) -> None:
        for some in in_turns(blocks):
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._outpost.overwriting.append(done)
            self._outpost.line.send(Overwrite(self._pool, some))
            await asyncio.shield(done)  # its place in the order stays, whoever still waits


class RemoteShare:
    """A `regional.node.receiving.Share`: what an outpost has said of it."""

    def __init__(self, outpost: Outpost, ticket: Ticket, changed: Callable[[], None]) -> None:
        self.expected = self.ready = ticket.empty
        self.failure: Failure | None = None
        self._outpost = outpost
        self._generation = ticket.generation
        self._changed = changed
        self.transfer = Transfer()
        self._then: Callable[[], None] | None = None
        if not ticket.empty:
            outpost.shares[ticket.generation] = self

    def hear(self, message: Expecting | Settled | Withdrawn) -> None:
        if isinstance(message, Withdrawn):
            self._forget()
            then, self._then = self._then, None
            if then is not None:
                then()
            return
        self.expected = True
        if isinstance(message, Settled):
            self.ready = message.failure is None
            self.failure = None if message.failure is None else Failure(message.failure)
            self.transfer = Transfer(
                computed_tokens=message.computed_tokens,
                seconds=message.seconds,
                bytes=message.bytes,
            )
        self._changed()

    @property
    def first_missing(self) -> int | None:
        """The outpost says nothing of parts: all is there, or nothing is."""
        return None if self.ready else 0

    def take(self) -> Transfer:
        if self._forget():
            self._outpost.line.send(Take(self._generation))
        return self.transfer

    def end(self, then: Callable[[], None]) -> None:
        if self._generation not in self._outpost.shares:
            then()
            return
        self._then = then
        self._changed = lambda: None
        self._outpost.line.send(Withdraw(self._generation))

    def _forget(self) -> bool:
        return self._outpost.shares.pop(self._generation, None) is not None
