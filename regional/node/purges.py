"""A namespace leaves this node: what runs for it ends, ranks forget it, memory is overwritten,
tiers let go. In this order, so that nothing can put back what the step before has taken away."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from core.engine import purge_messages
from core.errors import Cancelled, RequestError
from regional.node.pool import Pool
from regional.node.seams import Outbox
from regional.node.tiers.node_tiers import NodeTiers
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.node")

RANK_S = 30.0
"""A rank answers when the steps that are under way have ended."""


class Purges:
    """`end` fails everything that runs for a namespace, and says how much that was."""

    def __init__(
        self,
        pools: Sequence[Pool],
        tiers: NodeTiers | None,
        tasks: asyncio.TaskGroup,
        end: Callable[[str, RequestError], int],
    ) -> None:
        self._pools = pools
        self._tiers = tiers
        self._tasks = tasks
        self._end = end
        self._one_by_one = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[purge_messages.Purged]] = {}
        """By pool."""

    def begin(self, message: pb.Purge, outbox: Outbox) -> None:
        self._tasks.create_task(self._run(message.id, message.namespace, outbox), name="purge")

    def purged(self, pool: int, message: purge_messages.Purged) -> None:
        """A rank's answer."""
        waiting = self._waiting.get(pool)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _run(self, purge_id: str, namespace: str, outbox: Outbox) -> None:
        said = pb.Purged(id=purge_id)
        try:
            async with self._one_by_one:
                await self._purge(namespace, said)
        except TimeoutError:
            said.error = f"a rank has not answered in {RANK_S:g} s"
        except Exception as error:
            # Whoever asked has to know that something may be left.
            log.exception("a purge failed")
            said.error = type(error).__name__
        outbox.send(pb.NodeMessage(purged=said))

    async def _purge(self, namespace: str, said: pb.Purged) -> None:
        said.requests = self._end(namespace, Cancelled("what is kept of this namespace is purged"))
        for number, pool in enumerate(self._pools):
            told = await self._ask(number, pool, namespace)
            said.cached_blocks += told.cached_blocks
            said.scrubbed_blocks += len(told.blocks[0])
            for host in pool.receiving.hosts:
                await host.overwrite(told.blocks)
            pool.rank.send(purge_messages.Scrubbed(namespace))
        gone = await self._tiers.forget(namespace) if self._tiers is not None else Counter[str]()
        said.host_blocks, said.disk_blocks = gone["host"], gone["disk"]
        log.info(
            "a namespace was purged: blocks: %d cached, %d overwritten, %d on the host, %d on disk",
            said.cached_blocks, said.scrubbed_blocks, said.host_blocks, said.disk_blocks,
        )  # fmt: skip

    async def _ask(self, number: int, pool: Pool, namespace: str) -> purge_messages.Purged:
        answer: asyncio.Future[purge_messages.Purged] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        pool.rank.send(purge_messages.Purge(namespace))
        try:
            async with asyncio.timeout(RANK_S):
                return await answer
        finally:
            del self._waiting[number]
