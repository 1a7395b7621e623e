"""KV that is brought into a pool's prefix cache before a prompt is computed, from a tier below or
from a peer. It spares computing and nothing else: what does not come in time, or not intact, is
computed, and nobody hears of it.

An import is a reservation without a sequence: the rank sets blocks aside, they are filled under the
same machine, ticket and lease as a hand-off (`receiving`), and the rank adopts what is verified.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from core.engine.lending_messages import Adopt, Import
from core.engine.messages import (
    Abort,
    Reserved,
    SequenceFailed,
    SequenceSpec,
)
from core.engine.plan import SequenceId
from core.errors import BY_CODE, InternalError, RequestError
from core.kv.ticket import PieceKey
from core.types import BLOCK_TOKENS
from regional.node import wire
from regional.node.answer import Transfer
from regional.node.filling import Filling
from regional.node.pool import Pool
from regional.node.receiving import Reservation
from regional.node.seams import Outbox

log = logging.getLogger("skerry.node")

NOTHING = Transfer()


@dataclass(frozen=True, slots=True)
class Aside:
    """Blocks that were set aside for the start of a prompt, to be filled from a tier. `token_ids`
    are whole blocks; the first `cached_tokens` are in the pool already."""

    token_ids: tuple[int, ...]
    namespace: str
    cached_tokens: int
    filling: Filling

    @property
    def keys(self) -> tuple[PieceKey, ...]:
        """The pieces that are lacking, in order of the prompt's blocks."""
        return self.filling.keys

    def size(self, key: PieceKey) -> int:
        """Bytes of a piece."""
        return self.filling.size(key)

    def put(self, key: PieceKey, data: bytes | bytearray | memoryview) -> None:
        """One piece, verified. Raises TransferFailed when nobody wants it any more."""
        self.filling.put(key, data)


class Tier(Protocol):
    """A store below the pools' memory."""

    def reach(self, pool: Pool, token_ids: tuple[int, ...], namespace: str) -> int:
        """How many first tokens of a prompt (whole blocks) the pool could have with what lies
        here; 0 where that is not worth it. Does not wait."""
        ...

    async def fill(self, pool: Pool, aside: Aside) -> None:
        """Put the pieces, in order. One that is not to be had ends it: what was put before is used.
        Cancelled when time is up or nobody wants them any more. May raise RequestError."""
        ...


def whole_blocks(spec: SequenceSpec) -> tuple[int, ...]:
    """The tokens of a sequence in whole blocks, without the last one, which is always computed."""
    tokens = (*spec.token_ids, *spec.output_ids)
    return tokens[: (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class Want:
    """The first n−1 tokens of `spec` are about to be computed in `pool`. `pull_tokens` of them are
    worth fetching from a peer within `pull_s`; the router that `outbox` leads to sends it here."""

    attempt_id: str
    pool: Pool
    spec: SequenceSpec
    outbox: Outbox
    pull_tokens: int = 0
    pull_s: float = 0.0


class Imports:
    """The imports of a node. `generations` counts its tickets; `ended` is called after each."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        generations: Iterator[int],
        *,
        tier: Tier | None,
        ended: Callable[[], None],
    ) -> None:
        self.bytes_received = 0
        self._tasks = tasks
        self._generations = generations
        self._tier = tier
        self._ended = ended
        self._numbers = itertools.count(1)
        self._running: dict[SequenceId, _Import] = {}

    def __len__(self) -> int:
        return len(self._running)

    def before(self, want: Want, compute: Callable[[Transfer], None]) -> asyncio.Task[None] | None:
        """Call `compute` when there is nothing more to bring: at once, or from the task that is
        given back, which whoever ends the attempt cancels. It is told what came from a peer."""
        reach = self._reach(want)
        if not reach and not want.pull_tokens:
            compute(NOTHING)
            return None
        work = self._bring(want, reach, compute)
        return self._tasks.create_task(work, name=f"import-{want.attempt_id}")

    def reserved(self, message: Reserved) -> bool:
        """False: it is no import of ours."""
        one = self._running.get(message.sequence)
        if one is not None:
            one.answered(message)
        return one is not None

    def failed(self, message: SequenceFailed) -> None:
        one = self._running.get(message.sequence)
        if one is not None:
            kind = BY_CODE.get(message.code, InternalError)
            one.answered(kind(message.message))

    def proceed(self, attempt_id: str) -> None:
        """Whatever this attempt pulls has come, or will not."""
        for one in self._running.values():
            if one.want.attempt_id == attempt_id:
                one.proceed()

    def _reach(self, want: Want) -> int:
        if self._tier is None:
            return 0
        return self._tier.reach(want.pool, whole_blocks(want.spec), want.spec.namespace)

    async def _bring(self, want: Want, reach: int, compute: Callable[[Transfer], None]) -> None:
        tier, came = self._tier, NOTHING
        if tier is not None and reach:
            await self._import(want, reach, partial(_fill, tier), want.pool.receiving.lease_s)
        if want.pull_tokens:
            patience_s = want.pull_s or want.pool.receiving.lease_s
            came = await self._import(want, want.pull_tokens, _pull, patience_s)
            self.bytes_received += came.bytes
        compute(came)

    async def _import(
        self,
        want: Want,
        tokens: int,
        fill: Callable[[_Import, Reservation], Awaitable[None]],
        patience_s: float,
    ) -> Transfer:
        sequence = SequenceId(f"{want.attempt_id}:import{next(self._numbers)}")
        one = _Import(want, whole_blocks(want.spec)[:tokens], sequence, next(self._generations))
        self._running[sequence] = one
        try:
            async with asyncio.timeout(patience_s):
                await fill(one, await one.reserve())
        except (RequestError, TimeoutError) as error:
            log.info("attempt %s: no KV was brought: %s", want.attempt_id, _why(error))
        except Exception:
            # A fault here costs the time to compute, never the answer.
            log.exception("attempt %s: an import failed", want.attempt_id)
        finally:
            del self._running[sequence]
            one.close()
            self._ended()
        return one.came


class _Import:
    """One run of blocks, from its Import to its Adopt or Abort."""

    def __init__(
        self, want: Want, token_ids: tuple[int, ...], sequence: SequenceId, generation: int
    ) -> None:
        self.want = want
        self.token_ids = token_ids
        self.cached_tokens = 0
        self.came = NOTHING
        self._sequence = sequence
        self._generation = generation
        self._reply: asyncio.Future[Reserved | RequestError] = (
            asyncio.get_running_loop().create_future()
        )
        self._news = asyncio.Event()
        self._left_alone = False
        self._reservation: Reservation | None = None

    def answered(self, reply: Reserved | RequestError) -> None:
        """The rank's word; after the first it has nothing to say that matters here."""
        if not self._reply.done():
            self._reply.set_result(reply)

    def proceed(self) -> None:
        self._left_alone = True
        self._news.set()

    async def reserve(self) -> Reservation:
        """Raises RequestError when the rank has no room."""
        spec, pool = self.want.spec, self.want.pool
        pool.rank.send(
            Import(
                sequence=self._sequence,
                token_ids=self.token_ids,
                namespace=spec.namespace,
                priority=spec.priority,
            )
        )
        reply = await self._reply
        if isinstance(reply, RequestError):
            raise reply
        self.cached_tokens = reply.cached_tokens
        self._reservation = Reservation(pool.receiving, reply, self._generation, self._news.set)
        return self._reservation

    def waiting(self, reservation: Reservation) -> bool:
        """Can anything more come?"""
        return not (self._left_alone or reservation.ready or reservation.failure)

    async def news(self) -> None:
        """Wait until something has changed."""
        await self._news.wait()
        self._news.clear()

    def close(self) -> None:
        """Hand the rank what is verified. Nothing writes into the blocks by the time it may use
        them: the order is that of `receiving`."""
        rank, reservation = self.want.pool.rank, self._reservation
        if reservation is None:
            rank.send(Abort(self._sequence))
        elif reservation.ready:
            self.came = reservation.take()
            rank.send(Adopt(self._sequence, len(self.token_ids)))
        else:
            reservation.end(partial(self._salvage, reservation))

    def _salvage(self, reservation: Reservation) -> None:
        self.came = reservation.transfer
        first = reservation.first_missing
        tokens = len(self.token_ids) if first is None else first * BLOCK_TOKENS
        self.want.pool.rank.send(Adopt(self._sequence, tokens))


def _why(error: RequestError | TimeoutError) -> str:
    return error.message if isinstance(error, RequestError) else "time is up"


async def _pull(one: _Import, reservation: Reservation) -> None:
    """Give a ticket to the router, which gives it to who has the blocks."""
    given = False
    while one.waiting(reservation):
        if reservation.expected and not given:
            given = True
            ticket = wire.ticket_message(reservation.ticket)
            one.want.outbox.send(wire.pulling(one.want.attempt_id, ticket, one.cached_tokens))
        await one.news()


async def _fill(tier: Tier, one: _Import, reservation: Reservation) -> None:
    filling = reservation.fill_here()
    if filling is not None and filling.keys:
        spec = one.want.spec
        await tier.fill(
            one.want.pool, Aside(one.token_ids, spec.namespace, one.cached_tokens, filling)
        )
        if reservation.first_missing is None:
            filling.end()
