"""The in-memory twin of a Share, a clock to turn by hand, and what a tab needs around it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from core.config_tenants import Budgets as Settings
from core.config_tenants import Tenant
from core.errors import LimitsUnavailable
from core.events import Delta, Done, Finish
from core.types import GenerateRequest, ModelName, RegionName, RequestId, Sampling
from core.usage import UsageReader, UsageRecord, UsageWriter
from edge.gateway import Batch, Place
from edge.routing.placement import Reason
from edge.tenants.budget import Budgets
from edge.tenants.door import Caller
from edge.tenants.ledger import Ledger
from edge.tenants.meter import Limit
from edge.tenants.pool import Pool
from edge.tenants.share import Grant, Share

NOW = 1_796_040_030.0  # 30 s into a minute, noon of a day


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Pot:
    """What all ledgers share: windows and who was granted what, streams and who holds them."""

    lease: float = 0.1
    granted: defaultdict[tuple[str, str], dict[tuple[str, int], int]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    streams: defaultdict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    lost: bool = False
    asked: int = 0


class MemoryShare:
    def __init__(self, pot: Pot, name: str = "me") -> None:
        self._pot = pot
        self._name = name

    def lease(self, limit: Limit) -> int:
        return max(1, int(limit.amount * self._pot.lease))

    async def take(
        self,
        tenant: str,
        limit: Limit,
        window: int,
        *,
        have: int,
        need: int,
        past: Mapping[int, int],
    ) -> Grant:
        await self._asked()
        held = self._pot.granted[tenant, limit.kind]
        held.update({(self._name, one): used for one, used in past.items()})
        own = self._name, window
        held[own] = max(held.get(own, 0), have)
        left = limit.amount - sum(
            count for (_, one), count in held.items() if one > window - limit.span
        )
        taken = min(left, max(need, self.lease(limit))) if 0 < need <= left else 0
        held[own] += taken
        return Grant(held[own], max(left - taken, 0))

    async def hold(self, tenant: str, streams: int, *, have: int, need: int) -> Grant:
        await self._asked()
        held = self._pot.streams[tenant]
        held[self._name] = have
        left = streams - sum(held.values())
        lease = max(1, int(streams * self._pot.lease))
        taken = max(need, min(lease, left // 4)) if 0 < need <= left else 0
        held[self._name] += taken
        return Grant(held[self._name], max(left - taken, 0))

    async def _asked(self) -> None:
        await asyncio.sleep(0)
        self._pot.asked += 1
        if self._pot.lost:
            raise LimitsUnavailable("lost")


@dataclass(frozen=True)
class Bench:
    """A process's budgets with their parts laid open."""

    budgets: Budgets
    pool: Pool
    ledger: Ledger
    clock: Clock
    folder: Path

    def records(self) -> list[UsageRecord]:
        return UsageReader().read(self.folder / "usage")


@asynccontextmanager
async def bench(
    folder: Path,
    *,
    share: Share | None = None,
    when_lost: Literal["refuse", "allow"] = "refuse",
    owner: str = "me",
    clock: Clock | None = None,
) -> AsyncIterator[Bench]:
    clock = clock or Clock()
    ledger = Ledger(folder / "budgets.counts")
    usage = UsageWriter(folder / "usage", owner, clock=clock)
    async with asyncio.TaskGroup() as tasks:
        pool = Pool(ledger, share, when_lost=when_lost, tasks=tasks, clock=clock)
        budgets = Budgets(pool=pool, settings=Settings(), usage=usage, edge="here", clock=clock)
        yield Bench(budgets, pool, ledger, clock, folder)
    usage.close()
    ledger.close()


def caller(**limits: int) -> Caller:
    tenant = Tenant(
        requests_per_minute=limits.get("requests_per_minute"),
        tokens_per_minute=limits.get("tokens_per_minute"),
        tokens_per_day=limits.get("tokens_per_day"),
        concurrent_streams=limits.get("concurrent_streams"),
    )
    return Caller("acme", tenant, "key1", "acme", None)


def request(
    name: str = "r1", prompt: int = 5, answer: int | None = 55, text: str = "", n: int = 1
) -> GenerateRequest:
    return GenerateRequest(
        id=RequestId(name),
        model=ModelName("tiny"),
        prompt=text or tuple(range(prompt)),
        sampling=Sampling(max_tokens=answer, n=n),
        seed=1,
        rendered_at=1,
    )


def batch(*events: Delta | Finish | Done, counted: int = 5) -> Batch:
    place = Place(RegionName("eu"), Reason.PREFIX_HOME, prompt_tokens=counted)
    return Batch(place, events or (Delta(token_ids=(1, 2), text="ab"),))
