"""The store for coroutines: one thread does what touches the disk."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from core.batches import BatchState, Owed, QueueLeft, Submission
from core.errors import InternalError
from regional.queue.rules import Again, Answered
from regional.queue.store import Job, Store

_P = ParamSpec("_P")
_T = TypeVar("_T")


class KeptQueue:
    """Owns `store`. Every method raises InternalError where the disk fails. `clock` gives Unix
    seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "queue")

    async def recover(self) -> None:
        await self._do(Store.recover, self._clock())

    async def add(self, batch: Submission) -> BatchState:
        """Raises NoCapacity."""
        return await self._do(Store.add, batch, self._clock())

    async def claim(self, count: int) -> list[Job]:
        return await self._do(Store.claim, count, self._clock())

    async def end(self, job: Job, outcome: Answered | Again) -> None:
        await self._do(Store.end, job, outcome, self._clock())

    async def state(self, batch: str, namespace: str) -> BatchState | None:
        return await self._do(Store.state, batch, namespace)

    async def owed(self, collector: str) -> list[Owed]:
        """What this ledger is to write down, or a part of it."""
        return await self._do(Store.owed, collector)

    async def written(self, collector: str, request_ids: Sequence[str]) -> list[str]:
        """Those that were owed until now."""
        return await self._do(Store.written, collector, request_ids)

    async def waiting(self) -> int:
        """Items without an answer."""
        return await self._do(Store.waiting)

    async def left(self) -> QueueLeft:
        return await self._do(Store.left)

    async def purge(self, namespace: str) -> int:
        """How many batches it had."""
        return await self._do(Store.purge, namespace)

    async def sweep(self) -> None:
        await self._do(Store.sweep, self._clock())

    async def close(self) -> None:
        """After what is under way."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    async def _do(
        self, call: Callable[Concatenate[Store, _P], _T], *given: _P.args, **named: _P.kwargs
    ) -> _T:
        def work() -> _T:
            return call(self._store, *given, **named)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise InternalError(f"the queue's disk failed: {error}") from error
