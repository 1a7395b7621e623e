"""Composition: the door and the budgets of one edge process, and what keeps them fresh."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.config import World
from core.pins import pins_of
from core.usage import UsageWriter
from edge.tenants.budget import Budgets
from edge.tenants.door import Agents, Door
from edge.tenants.keyring import Keyring
from edge.tenants.ledger import Ledger
from edge.tenants.pool import Pool
from edge.tenants.share import Share

if TYPE_CHECKING:  # imported by the worlds that follow another edge
    from edge.tenants.follower import Follower


@dataclass(frozen=True, slots=True)
class Tenants:
    door: Door
    budgets: Budgets
    keyring: Keyring


@asynccontextmanager
async def open_tenants(
    world: World,
    edge: str,
    *,
    tasks: asyncio.TaskGroup,
    agents: Agents | None = None,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Tenants]:
    """Every process of the state folder opens its own; what they share lies in files. Raises
    ConfigError."""
    topology = world.topology
    writer = f"{edge}-{os.getpid()}-{secrets.token_hex(4)}"
    keys = world.state / topology.access.keys
    keyring = Keyring(keys)
    ledger = Ledger(world.state / "budgets.counts")
    usage = UsageWriter(world.state / "usage", writer, clock=clock)
    async with AsyncExitStack() as stack:
        stack.callback(ledger.close)
        stack.callback(usage.close)
        pool = Pool(
            ledger,
            await _share(world, ledger, writer, stack),
            when_lost=topology.budgets.when_redis_is_lost,
            tasks=tasks,
            clock=clock,
        )
        keepers = [tasks.create_task(keyring.run()), tasks.create_task(pool.run())]
        if (source := topology.access.keys_from) is not None:
            follower = await _follower(world, source, keys, stack)
            await follower.ask()
            keyring.look()
            keepers.append(tasks.create_task(follower.run()))
        try:
            yield Tenants(
                door=Door(topology, keyring.book, look=keyring.look, agents=agents, clock=clock),
                budgets=Budgets(
                    pool=pool, settings=topology.budgets, usage=usage, edge=edge, clock=clock
                ),
                keyring=keyring,
            )
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)


# What few worlds use is imported by those: a tenth of a second each.


async def _follower(world: World, source: str, keys: Path, stack: AsyncExitStack) -> Follower:
    import ssl

    import httpx

    from edge.tenants.follower import Follower

    known = next((one for one in world.topology.edges if source in (one.listen, one.url)), None)
    base = known.url if known else source if "://" in source else f"http://{source}"
    pins = pins_of(world, known) if known else None
    verify = pins.context if pins else ssl.create_default_context()
    client = await stack.enter_async_context(httpx.AsyncClient(verify=verify, trust_env=False))
    return Follower(base.rstrip("/"), keys, client, secret=world.secret("region"), pins=pins)


async def _share(world: World, ledger: Ledger, process: str, stack: AsyncExitStack) -> Share | None:
    settings = world.topology.budgets
    if settings.redis is None:
        return None
    from edge.tenants.redis_share import RedisShare, redis_client

    password = world.secret("redis") if world.topology.secrets.redis is not None else None
    client = redis_client(settings.redis, password=password, timeout_s=settings.redis_timeout_s)
    stack.push_async_callback(client.aclose)
    return RedisShare(
        client,
        ledger=ledger.name,
        process=process,
        lease=settings.lease,
        timeout_s=settings.redis_timeout_s,
    )
