"""Limits that several ledgers share, in Redis.

For each limit Redis holds a hash: ledger and window → what was granted of it. One script reads,
adds up what counts together, and grants, so that all grants never pass the limit. What a ledger
did not use of a window is free again as soon as it says so, and it says so whenever it asks for a
later one. A ledger also says what it has already: a Redis that lost its memory learns it again
from those who ask, and what others still hold unasked is all that can pass twice.

Streams at one moment have a hash of their own: process → places it holds, and until when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from redis import RedisError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript

from core.errors import LimitsUnavailable
from edge.tenants.meter import Limit
from edge.tenants.share import HOLD_S, Grant

PAUSE_S = 1.0
"""After a failure Redis is left alone for this long, so that refusals stay quick."""
_TAKE = """
local name, window = ARGV[1], tonumber(ARGV[2])
local need, lease, amount = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local oldest = window - tonumber(ARGV[7]) + 1
local own = name .. ':' .. window
for i = 9, #ARGV, 2 do redis.call('HSET', KEYS[1], name .. ':' .. ARGV[i], ARGV[i + 1]) end
local mine = math.max(tonumber(redis.call('HGET', KEYS[1], own) or '0'), tonumber(ARGV[3]))
local total = mine
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local of = tonumber(string.match(all[i], ':(%d+)$'))
  if of < oldest - 1 then redis.call('HDEL', KEYS[1], all[i])
  elseif of >= oldest and all[i] ~= own then total = total + tonumber(all[i + 1]) end
end
local left, take = amount - total, 0
if need > 0 and left >= need then take = math.min(left, math.max(need, lease)) end
redis.call('HSET', KEYS[1], own, mine + take)
redis.call('EXPIRE', KEYS[1], ARGV[8])
return {mine + take, math.max(left - take, 0)}
"""
_HOLD = """
local have, need, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local most, hold_ms = tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = most - have
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local count, ends = string.match(all[i + 1], '^(%d+):(%d+)$')
  if tonumber(ends) < now then redis.call('HDEL', KEYS[1], all[i])
  elseif all[i] ~= ARGV[1] then left = left - tonumber(count) end
end
local take = 0
if need > 0 and left >= need then
  take = math.max(need, math.min(lease, math.floor(left / 4)))
end
if have + take > 0 then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%d:%d', have + take, now + hold_ms))
else
  redis.call('HDEL', KEYS[1], ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], 2 * hold_ms)
return {have + take, math.max(left - take, 0)}
"""


class RedisShare:
    """`ledger`: our name among all; `process`: this process's. `client` is closed by the owner."""

    def __init__(
        self,
        client: Redis,
        *,
        ledger: str,
        process: str,
        lease: float,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take = client.register_script(_TAKE)
        self._hold = client.register_script(_HOLD)
        self._ledger = ledger
        self._process = process
        self._lease = lease
        self._timeout_s = timeout_s
        self._clock = clock
        self._paused_until = float("-inf")

    def lease(self, limit: Limit) -> int:
        return self._part(limit.amount)

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
        told = [number for pair in past.items() for number in pair]
        lasts_s = (limit.span + 1) * limit.window_s
        return await self._ask(
            self._take,
            f"skerry:limits:{tenant}:{limit.kind}",
            self._ledger, window, have, need, self.lease(limit), limit.amount, limit.span,
            lasts_s, *told,
        )  # fmt: skip

    async def hold(self, tenant: str, streams: int, *, have: int, need: int) -> Grant:
        return await self._ask(
            self._hold,
            f"skerry:streams:{tenant}",
            self._process, have, need, self._part(streams), streams, int(HOLD_S * 1000),
        )  # fmt: skip

    def _part(self, amount: int) -> int:
        return max(1, int(amount * self._lease))

    async def _ask(self, script: AsyncScript, key: str, *args: str | int) -> Grant:
        if self._clock() < self._paused_until:
            raise LimitsUnavailable("limits cannot be asked for at present", retry_after_s=PAUSE_S)
        try:
            async with asyncio.timeout(self._timeout_s):
                granted, left = await cast(
                    "Awaitable[tuple[int, int]]", script(keys=[key], args=list(args))
                )
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
