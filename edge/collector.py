"""Brings what queued requests used from the regions into this ledger, polled for or not.

A region owes each usage to the ledger that charged it. Records are written first and then told to
the region, which forgets them and says which it still had: what follows from a record, that the
day's count is set right, is done for those alone, and so once at most. A process
that dies between writing and telling is told again and writes again; readers take each request
once. Processes that share the ledger take turns by a kernel lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from core.batches import Owed
from core.errors import InternalError, LimitsUnavailable, RequestError
from core.types import RegionName
from core.usage import UsageRecord
from edge.queue_client import QueueClient
from edge.tenants.budget import Budgets
from edge.tenants.lock import KernelLock

_log = logging.getLogger("skerry.batch")

EACH_S = 5.0
TURN_S = 10.0
"""Longest wait for another process of this ledger that collects just now."""
_LOOK_S = 0.02
DIALECT = "batch"
"""In metrics and in the ledger."""


class Account(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To whom a queued request is charged. `charged`: tokens taken from the quota of `day`."""

    tenant: str
    key: str
    day: int = 0
    charged: int = 0
    worker: str = ""


class Collector:
    """`lock` is a file beside the ledger."""

    def __init__(
        self,
        clients: Mapping[RegionName, QueueClient],
        budgets: Budgets,
        lock: Path,
    ) -> None:
        self._clients = clients
        self._budgets = budgets
        self._lock = lock
        self._unreached: set[RegionName] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EACH_S)
            await asyncio.gather(*(self._tried(region) for region in self._clients))

    async def collect(self, region: RegionName) -> None:
        """All that the region owes us now. Raises RequestError."""
        try:
            lock = KernelLock(self._lock)
        except OSError as error:
            raise InternalError(f"{self._lock}: {error.strerror}") from error
        try:
            await self._turn(lock)
            while items := await self._clients[region].owed(self._budgets.ledger):
                await self._take(region, items)
        finally:
            lock.close()

    async def _turn(self, lock: KernelLock) -> None:
        try:
            async with asyncio.timeout(TURN_S):
                while not lock.tried():  # noqa: ASYNC110 - nobody tells when it is free
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise InternalError("another process has collected usage for too long") from error

    async def _take(self, region: RegionName, items: Sequence[Owed]) -> None:
        accounts = {one.request_id: _account(one) for one in items}
        for one in items:
            self._write(region, one, accounts[one.request_id])
        ids = list(accounts)
        fresh = await self._clients[region].written(self._budgets.ledger, ids)
        for one in items:
            account = accounts[one.request_id]
            used = one.usage.prompt_tokens + one.usage.completion_tokens
            if one.request_id in fresh and account.charged:
                self._correct(account, used - account.charged)

    def _write(self, region: RegionName, one: Owed, account: Account) -> None:
        budgets = self._budgets
        record = UsageRecord(
            id=one.request_id,
            at=budgets.clock(),
            edge=budgets.edge,
            tenant=account.tenant,
            key=account.key,
            model=one.model,
            region=region,
            dialect=DIALECT,
            outcome=one.outcome,
            prompt=one.usage.prompt_tokens,
            cached=one.usage.cached_tokens,
            completion=one.usage.completion_tokens,
            complete=one.outcome == "ok",
            worker=account.worker,
        )
        try:
            budgets.usage.write(record)
        except OSError as error:
            raise InternalError("the usage of a batch could not be written down") from error

    def _correct(self, account: Account, tokens: int) -> None:
        try:
            self._budgets.pool.correct_day(account.tenant, account.day, tokens)
        except LimitsUnavailable as error:
            _log.error("a batch stays charged as estimated why=%s", error.message)

    async def _tried(self, region: RegionName) -> None:
        try:
            await self.collect(region)
        except RequestError as error:
            if region not in self._unreached:
                _log.warning("usage of batches waits region=%s why=%s", region, error.message)
            self._unreached.add(region)
        else:
            self._unreached.discard(region)


def _account(one: Owed) -> Account:
    try:
        return msgspec.msgpack.decode(one.account, type=Account)
    except msgspec.MsgspecError as error:
        raise InternalError("the region owes usage to an account that is not understood") from error
