"""Answers that are pushed out of a pool whose host has memory to spare: their KV is copied there
while the rank leaves it in place, so that it need not be computed once more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from core.engine.messages import GivenBack, Release, SequenceSpec
from regional.node.pool import Pool
from regional.node.tiers.node_tiers import NodeTiers

log = logging.getLogger("skerry.node")


class Partings:
    def __init__(self, tasks: asyncio.TaskGroup, tiers: NodeTiers | None) -> None:
        self._tasks = tasks
        self._tiers = tiers

    def keep(self, pool: Pool) -> bool:
        """Are blocks of this pool worth holding for a copy?"""
        return self._tiers is not None and self._tiers.saves(pool)

    def begin(
        self,
        pool: Pool,
        spec: SequenceSpec,
        output_ids: tuple[int, ...],
        message: GivenBack,
        then: Callable[[], None],
    ) -> None:
        """Copy, let the rank have its blocks, and call `then`. `output_ids`: the answer so far."""
        tokens = (*spec.token_ids, *output_ids)[: message.tokens]
        self._tasks.create_task(self._copy(pool, spec.namespace, tokens, message, then))

    async def _copy(
        self,
        pool: Pool,
        namespace: str,
        tokens: tuple[int, ...],
        message: GivenBack,
        then: Callable[[], None],
    ) -> None:
        try:
            if self._tiers is not None:
                await self._tiers.save(pool, namespace, tokens, message.blocks)
        except Exception:
            # A fault here costs computing, never the node or the answer.
            log.exception("what %s had computed was not kept", message.sequence)
        finally:
            pool.rank.send(Release(message.sequence))
        then()
