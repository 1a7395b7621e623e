"""The region's queue: requests wait here until there is a place for them.

Lower priority numbers first, then by age; a request that is placed again keeps its age. A request
that waits for a prefill node holds up only those behind it that need one too.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core.errors import NoCapacity
from core.types import BLOCK_TOKENS, ModelName, PoolId, Role
from regional.cluster import UNMEASURED_TOKENS_PER_S, Charge, Cluster, ClusterView
from regional.kv_index import Held, KvIndex
from regional.placement import (
    TYPICAL_ANSWER_TOKENS,
    Ask,
    Placement,
    Scarce,
    Wait,
    place,
    takes_prompt,
)
from regional.reading import Reading
from regional.rpc import NodeSession

LOOK_AHEAD = 32
"""Waiting requests of each model that are tried when something has become free."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's part in one attempt; `charge` is released when the attempt is over."""

    session: NodeSession
    dp_rank: int
    charge: Charge


@dataclass(frozen=True, slots=True)
class Placed:
    """`reusable_tokens`: the most that any node of the region holds of this prompt."""

    placement: Placement
    prefill: Seat | None
    decode: Seat
    reusable_tokens: int
    source: Seat | None = None
    """Whom the reading node pulls from; nothing is counted there."""

    def release(self) -> None:
        for seat in (self.prefill, self.decode):
            if seat is not None:
                seat.charge.release()


@dataclass(slots=True, eq=False)
class _Waiting:
    order: tuple[int, int]
    ask: Ask
    reading: Reading
    placed: asyncio.Future[Placed]
    since: float


class Dispatcher:
    """Places requests on the cluster's nodes and counts their work there."""

    def __init__(
        self,
        cluster: Cluster,
        index: KvIndex,
        *,
        limit: int,
        split_min_tokens: int,
        changed: Callable[[], None],
        cold: Callable[[ModelName], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cold` is told when a request waits for a model of which no node is up."""
        self._cluster = cluster
        self._index = index
        self._limit = limit
        self.split_min_tokens = split_min_tokens
        self._changed = changed
        self._cold = cold
        self._clock = clock
        self._line: list[_Waiting] = []
        self._poked = False

    @property
    def queued(self) -> int:
        return len(self._line)

    def waiting(self, before: int) -> int:
        """Requests in the queue whose priority number is lower than `before`."""
        return bisect.bisect_left(self._line, (before, 0), key=lambda one: one.order)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the waiting requests, as if nothing of them were cached."""
        return sum(waiting.ask.prompt_tokens for waiting in self._line)

    def waiting_for(self, model: ModelName) -> tuple[int, int]:
        """Requests for it that wait, and their prompt tokens."""
        asks = [one.ask for one in self._line if one.ask.model == model]
        return len(asks), sum(ask.prompt_tokens for ask in asks)

    def waiting_s(self, model: ModelName) -> float:
        """How long the first of them has waited; 0 where none does."""
        since = min((one.since for one in self._line if one.ask.model == model), default=None)
        return 0.0 if since is None else self._clock() - since

    async def place(
        self,
        ask: Ask,
        reading: Reading,
        *,
        age: int,
        priority: int,
        again: bool = False,
        wait: bool = True,
    ) -> Placed:
        """Wait for a place. The caller releases it. Raises NoCapacity at once when the queue is
        full (never for a request that is placed again), or where it would have to `wait` and may
        not; and what `placement.place` raises."""
        future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        waiting = _Waiting((priority, age), ask, reading, future, self._clock())
        bisect.insort(self._line, waiting, key=lambda one: one.order)
        self._pump()
        if not future.done() and not again and (len(self._line) > self._limit or not wait):
            self._line.remove(waiting)
            delay = max(1.0, self.estimate_s(self._cluster.view()))
            why = f"{len(self._line)} requests are waiting already" if wait else "no place is free"
            raise NoCapacity(why, retry_after_s=delay)
        try:
            return await future
        except asyncio.CancelledError:
            if waiting in self._line:
                self._line.remove(waiting)
                self.poke()  # those behind it may not need what it waited for
            elif future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()
                self.poke()
            raise

    def move_min_tokens(self, model: ModelName) -> int:
        """From so many lost tokens of KV on, an answer that was pushed out of memory had better be
        read anew by a prefill node, or brought back from its host's memory; 0 where no node of that
        model does either."""
        up = [one for one in self._cluster.view().nodes if one.offer(model) and not one.draining]
        if not any(one.role is Role.PREFILL or one.saves for one in up):
            return 0
        return max(1, self.split_min_tokens)

    def poke(self) -> None:
        """Something may have become free: try again, once for all pokes of this loop turn."""
        self._changed()
        if not self._poked and self._line:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._pump)

    def estimate_s(self, view: ClusterView) -> float:
        """How long a request that comes now would wait: for its turn to be read, or for a slot."""
        readers, decoders = view.readers(), view.decoders()
        rate = sum(node.prefill_tokens_per_s for node in readers) or UNMEASURED_TOKENS_PER_S
        to_read = self.queued_tokens / rate
        if all(not takes_prompt(node, 1) for node in readers):
            backlogs = (node.prefill_tokens / node.prefill_tokens_per_s for node in readers)
            to_read += min(backlogs, default=0.0)
        if not decoders or any(node.sequences < node.max_sequences for node in decoders):
            return to_read
        slots_rate = sum(node.decode_tokens_per_s * node.max_sequences for node in decoders)
        return max(to_read, (len(self._line) + 1) * TYPICAL_ANSWER_TOKENS / slots_rate)

    def _pump(self) -> None:
        self._poked = False
        scarce: set[tuple[str, Scarce]] = set()
        tried: Counter[str] = Counter()
        view: ClusterView | None = None
        for waiting in tuple(self._line):
            model = waiting.ask.model
            if waiting.placed.done() or {(model, Scarce.DECODE), (model, Scarce.COLD)} & scarce:
                continue
            if tried[model] >= LOOK_AHEAD:
                continue
            tried[model] += 1
            view = view or self._cluster.view()
            try:
                outcome = self._decide(view, waiting, (model, Scarce.PREFILL) in scarce)
            except Exception as error:  # noqa: BLE001 - raised in the coroutine that waits for it
                self._line.remove(waiting)
                waiting.placed.set_exception(error)
                continue
            if isinstance(outcome, Wait):
                scarce.add((model, outcome.scarce))
                if outcome.scarce is Scarce.COLD:
                    self._cold(model)
            else:
                self._line.remove(waiting)
                waiting.placed.set_result(outcome)
                view = None  # it counts now

    def _decide(self, view: ClusterView, waiting: _Waiting, prefill_scarce: bool) -> Placed | Wait:
        held = self._held(view, waiting)
        decision = place(view, held, waiting.ask, split_min_tokens=self.split_min_tokens)
        if isinstance(decision, Wait):
            return decision
        if decision.prefill is not None and prefill_scarce:
            return Wait(Scarce.PREFILL)  # an older request waits for that node
        return self._seat(decision, waiting, held)

    def _held(self, view: ClusterView, waiting: _Waiting) -> Mapping[PoolId, Held]:
        """What each pool that serves the model holds of the prompt."""
        pools: dict[bytes, list[PoolId]] = {}
        for node in view.nodes:
            if (offer := node.offer(waiting.ask.model)) is not None:
                pools.setdefault(offer.fingerprint, []).append(node.pool)
        held: dict[PoolId, Held] = {}
        for fingerprint, those in pools.items():
            found = self._index.overlaps(waiting.reading.hashes(fingerprint))
            held.update((pool, found[pool]) for pool in those if pool in found)
        return held

    def _seat(self, decision: Placement, waiting: _Waiting, held: Mapping[PoolId, Held]) -> Placed:
        prefill = source = None
        if decision.prefill is not None:
            prefill = self._charged(decision.prefill, prefill_tokens=decision.compute_tokens)
        decode = self._charged(
            decision.decode,
            prefill_tokens=decision.compute_tokens if prefill is None else None,
            answer_tokens=waiting.ask.answer_tokens,
            choices=waiting.ask.choices,
        )
        if decision.pull is not None:
            source = self._charged(decision.pull.source, prefill_tokens=None)
        most = max((one.blocks for one in held.values()), default=0) * BLOCK_TOKENS
        self._changed()
        return Placed(decision, prefill, decode, reusable_tokens=most, source=source)

    def _charged(
        self,
        pool: PoolId,
        *,
        prefill_tokens: int | None,
        answer_tokens: int | None = None,
        choices: int = 1,
    ) -> Seat:
        member = self._cluster.find(pool.node)
        if member is None:
            raise LookupError(f"placed on {pool.node!r}, which is not a member")
        charge = member.pools[pool.dp_rank].charge(
            prefill_tokens=prefill_tokens, answer_tokens=answer_tokens, choices=choices
        )
        return Seat(member.session, pool.dp_rank, charge)
