"""The ranks of one node as one thing: started together, ready when all are, lost with the first.

A rank that ends takes the others with it: what a plan has split cannot go on without a part. The
one to blame is the one that did not end because of another (`EXIT_PEER`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from core.engine.messages import EXIT_PEER, RankConfig, Ready
from core.errors import ConfigError, NodeLost
from core.parallel import ONE_HOST, Hosts
from regional.node.rank_link import (
    PATIENCE,
    RANK_COMMAND,
    Loaded,
    Patience,
    RankLink,
)

SEVERAL_SERVING_S = 3.0
"""A silent rank of several holds up all of them: it is given up this soon."""
PULSE_SEVERAL_S = 0.5
BLAME_S = 0.5
"""When ranks have ended because of another, so long for that one to be seen."""


class Ranks:
    """Made by `start`; `close` ends all processes whatever they do."""

    def __init__(self, links: Sequence[RankLink], plan: RankConfig) -> None:
        self.links = tuple(links)
        self.plan = plan.plan
        self._lost = asyncio.create_task(self._first_lost(), name="ranks-lost")

    @classmethod
    async def start(
        cls,
        config: RankConfig,
        hosts: Hosts = ONE_HOST,
        *,
        command: Sequence[str] = RANK_COMMAND,
        patience: Patience = PATIENCE,
    ) -> Ranks:
        """Start the ranks of this host. `config` is what all of them share."""
        plan = config.plan
        if plan.ranks == 1:
            return cls([await RankLink.start(config, command=command, patience=patience)], config)
        patience = replace(patience, serving_s=min(patience.serving_s, SEVERAL_SERVING_S))
        patience = replace(patience, look_s=min(patience.look_s, PULSE_SEVERAL_S))
        meeting = _meeting(hosts)
        secret = hosts.secret or secrets.token_hex(16)
        links: list[RankLink] = []
        try:
            for rank in hosts.ranks(plan):
                first = rank == 0 and meeting is not None
                one = msgspec.structs.replace(
                    config,
                    rank=rank,
                    local_rank=rank - hosts.ranks(plan).start,
                    master_addr=hosts.address,
                    master_port=meeting.getsockname()[1] if meeting else hosts.port,
                    master_fd=meeting.fileno() if first and meeting else -1,
                    master_secret=secret,
                    pulse_s=PULSE_SEVERAL_S,
                )
                links.append(await RankLink.start(one, command=command, patience=patience))
        except BaseException:
            await asyncio.gather(*(link.close() for link in links))
            raise
        finally:
            if meeting is not None:
                meeting.close()
        return cls(links, config)

    async def ready(self) -> tuple[Loaded, ...]:
        """Wait until all serve. Raises ConfigError when they cannot load what they were told to,
        NodeLost when one dies."""
        everyone = asyncio.gather(*(link.ready() for link in self.links))
        either: list[asyncio.Future[Any]] = [everyone, self._lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not everyone.done():
                raise self._lost.result()
            try:
                loaded = tuple(everyone.result())
            except NodeLost:
                raise await self.lost() from None  # that one may have ended because of another
        finally:
            everyone.cancel()
        return loaded

    async def lost(self) -> NodeLost:
        """Wait for the first end of a rank; the error says who ended and how, in one line. The
        others have been killed then."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Ask the ranks to stop, then make them. Returns when the processes are gone."""
        self._lost.cancel()
        await asyncio.gather(*(link.close() for link in self.links))

    async def _first_lost(self) -> NodeLost:
        ends = [asyncio.ensure_future(link.lost()) for link in self.links]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BLAME_S):
                    await self._blame(ends)
            for link in self.links:
                link.kill()
            return (self._to_blame(ends) or [one.result() for one in done])[0]
        finally:
            for one in ends:
                one.cancel()

    async def _blame(self, ends: Sequence[asyncio.Future[NodeLost]]) -> None:
        waiting = set(ends)
        while waiting and not self._to_blame(ends):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def _to_blame(self, ends: Sequence[asyncio.Future[NodeLost]]) -> list[NodeLost]:
        return [
            end.result()
            for link, end in zip(self.links, ends, strict=True)
            if end.done() and link.status != EXIT_PEER
        ]


def _meeting(hosts: Hosts) -> socket.socket | None:
    """The socket at which the ranks of one host find each other, bound here so that nobody can take
    its port. Several hosts have agreed on an address; their first rank binds it."""
    if hosts.count > 1:
        return None
    sock = socket.create_server((hosts.address, 0))
    sock.set_inheritable(True)
    return sock


def agree(ready: Sequence[Ready]) -> None:
    """All ranks have the same model, and pools of the same blocks. Raises ConfigError."""
    first = ready[0]
    for rank, one in enumerate(ready):
        if one.fingerprint != first.fingerprint:
            raise ConfigError(f"rank {rank} has loaded other weights than rank 0")
        if one.geometry.blocks != first.geometry.blocks:
            raise ConfigError(
                f"rank {rank} has pools of {one.geometry.blocks} blocks, "
                f"rank 0 of {first.geometry.blocks}"
            )
