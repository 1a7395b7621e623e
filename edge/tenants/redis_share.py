"""Limits that several ledgers share, in Redis.

For each window of a limit Redis holds a hash: ledger → what it has been granted. One script reads,
adds up and grants, so that all grants together never pass the limit. A ledger tells with each
question what it has already: a Redis that lost its memory learns it again from those who ask, and
what others still hold unasked is all that can pass twice.

Leases are not returned: the window's end voids them. So a tenant may be refused while another
ledger sits on an unused part of a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

from redis import RedisError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from core.errors import LimitsUnavailable
from edge.tenants.meter import Limit
from edge.tenants.share import Grant

PAUSE_S = 1.0
"""After a failure Redis is left alone for this long, so that refusals stay quick."""
_SCRIPT = """
local mine = math.max(tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0'), tonumber(ARGV[2]))
local total = mine
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i] ~= ARGV[1] then total = total + tonumber(all[i + 1]) end
end
local left = tonumber(ARGV[5]) - total
local need, take = tonumber(ARGV[3]), 0
if left >= need then take = math.min(left, math.max(need, tonumber(ARGV[4]))) end
redis.call('HSET', KEYS[1], ARGV[1], mine + take)
redis.call('EXPIRE', KEYS[1], ARGV[6])
return {mine + take, left - take}
"""


class RedisShare:
    """`ledger`: our name among all. `client` is closed by the owner."""

    def __init__(
        self,
        client: Redis,
        *,
        ledger: str,
        lease: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._script = client.register_script(_SCRIPT)
        self._ledger = ledger
        self._lease = lease
        self._timeout_s = timeout_s
        self._clock = clock
        self._paused_until = float("-inf")

    def lease(self, limit: Limit) -> int:
        return max(1, int(limit.amount * self._lease))

    async def take(self, tenant: str, limit: Limit, window: int, *, have: int, need: int) -> Grant:
        if self._clock() < self._paused_until:
            raise LimitsUnavailable("limits cannot be asked for at present", retry_after_s=PAUSE_S)
        try:
            async with asyncio.timeout(self._timeout_s):
                granted, left = await cast(
                    "Awaitable[tuple[int, int]]",
                    self._script(
                        keys=[f"skerry:limits:{tenant}:{limit.kind}:{window}"],
                        args=[
                            self._ledger, have, need, self.lease(limit), limit.amount,
                            2 * limit.period_s,
                        ],
                    ),
                )  # fmt: skip
        except (RedisError, TimeoutError, OSError) as error:
            self._paused_until = self._clock() + PAUSE_S
            raise LimitsUnavailable(
                "limits cannot be asked for at present", retry_after_s=PAUSE_S
            ) from error
        return Grant(granted, left)


def redis_client(url: str, *, password: bytes | None, timeout_s: float) -> Redis:
    """A client that fails at once instead of trying again: the caller waits meanwhile."""
    return Redis.from_url(
        url,
        password=password.decode() if password else None,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        decode_responses=True,
    )
