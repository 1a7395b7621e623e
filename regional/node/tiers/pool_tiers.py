"""One pool's tiers: which of a prompt's blocks they can bring, and which of the pool's they keep.

A block is kept when a second request finds it in the pool's prefix cache. It is copied while the
rank holds it in place for us, and written by the shelf's own thread: neither the event loop nor the
rank ever waits for a disk.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from core.engine.lending_messages import Held, Hold
from core.engine.messages import (
    Abort,
    Release,
    SequenceFailed,
)
from core.engine.plan import SequenceId
from core.kv.ticket import PieceKey
from core.kv.tiers.catalogue import Kept, Wanted
from core.kv.tiers.chain import first_seen, usable, wanted_blocks
from core.kv.tiers.entry import Entry
from core.kv.tiers.pays import LoadRate, pays
from core.kv.tiers.shape import Shape
from core.kv.tiers.shelf import Shelf
from core.types import BLOCK_TOKENS
from regional.node.imports import Aside
from regional.node.pool import Pool
from regional.node.tiers.tier_log import TierLog
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.tiers")

HOST = "host"
HOLD_S = 0.25
"""Blocks are held for copying about this long; what is left over then has its turn again."""
MOST_JOBS = 64
"""Prompts whose blocks wait to be copied; of more, the oldest are left out."""
BATCH = 8
"""Blocks that one visit to a shelf's thread reads."""


@dataclass(frozen=True, slots=True)
class _Job:
    namespace: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where block `index` of a prompt lies."""

    index: int
    shelf: Shelf
    kept: Kept


class PoolTiers:
    """All ranks of `pool` are here. `shelves`: the quickest first, their blocks told of in
    `known`. `owner` gives a namespace's tag."""

    def __init__(
        self,
        pool: Pool,
        shape: Shape,
        fingerprint: bytes,
        *,
        shelves: Sequence[Shelf],
        known: TierLog,
        owner: Callable[[str], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.rate = LoadRate()
        self.shelves = tuple(shelves)
        self._known = known
        self._pool = pool
        self._memory = pool.sending.memory
        self._shape = shape
        self._fingerprint = fingerprint
        self._owner = owner
        self._clock = clock
        groups = next(iter(self._memory.geometries.values())).groups
        self._windows = {n: group.window if n else None for n, group in enumerate(groups)}
        self._jobs: OrderedDict[bytes, _Job] = OrderedDict()
        """By the hash of the last block that a second request found."""
        self._work = asyncio.Event()
        self._keeping = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._reply: asyncio.Future[Held | SequenceFailed] | None = None
        self._held_as = SequenceId("")

    # ---------------------------------------------------------------- bringing back

    def reach(self, token_ids: tuple[int, ...], namespace: str) -> int:
        """See `imports.Tier`. Counts as a use of what the pool has of the prompt."""
        wanted = wanted_blocks(self._fingerprint, namespace, token_ids)
        have = next((n for n, one in enumerate(wanted) if one.digest not in self._pool.cache),
                    len(wanted))  # fmt: skip
        self._used(wanted[:have], _Job(namespace, token_ids[: have * BLOCK_TOKENS]))
        places = self._places(wanted, have)
        if not places:
            return 0
        size = sum(self._shape.size(one.kept.entry.groups) for one in places)
        rate = self._pool.stats.prefill_tokens_per_s
        if not pays(len(places), size, self.rate.bytes_per_s, rate):
            self.rate.left_alone()
            return 0
        return (have + len(places)) * BLOCK_TOKENS

    async def fill(self, aside: Aside) -> None:
        """See `imports.Tier`. What the disk reads next is read while the last is copied."""
        wanted = wanted_blocks(self._fingerprint, aside.namespace, aside.token_ids)
        places = self._places(wanted, aside.cached_tokens // BLOCK_TOKENS)
        keys: dict[int, list[PieceKey]] = {}
        for key in aside.keys:
            keys.setdefault(key.block, []).append(key)
        batches = _batches([one for one in places if one.index in keys])
        started, size = self._clock(), 0
        ahead: asyncio.Task[list[bytes | None]] | None = None
        try:
            for number, batch in enumerate(batches):
                contents = await (ahead or _load(batch))
                ahead = None
                if number + 1 < len(batches):
                    ahead = asyncio.create_task(_load(batches[number + 1]))
                for place, content in zip(batch, contents, strict=True):
                    if content is None or not self._put(aside, keys[place.index], place, content):
                        return
                    size += len(content)
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
            if size:
                self.rate.note(size, self._clock() - started)
        for shelf in self.shelves:
            await shelf.stamp([one.digest for one in wanted if one.digest in shelf])

    def _places(self, wanted: Sequence[Wanted], have: int) -> list[_Place]:
        places: list[_Place] = []
        for index in range(have, len(wanted)):
            pairs = ((shelf, shelf.find(wanted[index])) for shelf in self.shelves)
            place = next((_Place(index, s, kept) for s, kept in pairs if kept is not None), None)
            if place is None:
                break
            places.append(place)
        return places[: usable([one.kept for one in places], self._windows)]

    def _put(self, aside: Aside, keys: list[PieceKey], place: _Place, content: bytes) -> bool:
        """Every piece of one block that is lacking; False when one is not here."""
        view = memoryview(content)
        spans = {
            (part.rank, part.group): view[start:end]
            for part, start, end in self._shape.spans(place.kept.entry.groups)
        }
        if any((key.rank, key.group) not in spans for key in keys):
            return False
        for key in keys:
            aside.put(key, spans[key.rank, key.group])
        return True

    # ---------------------------------------------------------------- keeping

    def _used(self, wanted: Sequence[Wanted], job: _Job) -> None:
        """A second request, or a later one, has found these in the pool."""
        digests = [one.digest for one in wanted]
        for shelf in self.shelves:
            shelf.touch(digests)
        if all(one in shelf for shelf in self.shelves if not shelf.off for one in digests):
            return
        self._jobs[digests[-1]] = job
        self._jobs.move_to_end(digests[-1])
        if len(self._jobs) > MOST_JOBS:
            self._jobs.popitem(last=False)
        self._work.set()

    async def run(self) -> None:
        """Copy what is worth it, one prompt after the other. Until cancelled."""
        while True:
            await self._work.wait()
            async with self._keeping:
                if not self._jobs:
                    self._work.clear()
                    continue
                digest, job = self._jobs.popitem(last=False)
                try:
                    done = await self._keep(job)
                except Exception:
                    # A fault here costs a block in the tier, never the node.
                    log.exception("blocks were not kept")
                    continue
                if not done:
                    self._jobs.setdefault(digest, job)

    async def _keep(self, job: _Job) -> bool:
        """False: some of it is left for later."""
        sequence = self._held_as = SequenceId(f"keep:{next(self._numbers)}")
        self._reply = asyncio.get_running_loop().create_future()
        self._pool.rank.send(
            Hold(sequence=sequence, token_ids=job.token_ids, namespace=job.namespace)
        )
        reply: Held | SequenceFailed | None = None
        try:
            reply = await self._reply
            if not isinstance(reply, Held):
                return True
            return await self._copy(job, reply, self.shelves)
        finally:
            self._reply = None
            self._pool.rank.send(Release(sequence) if reply is not None else Abort(sequence))

    @property
    def saves(self) -> bool:
        """Is there a shelf as quick as memory?"""
        return any(shelf.name == HOST and not shelf.off for shelf in self.shelves)

    async def save(
        self, namespace: str, token_ids: tuple[int, ...], blocks: tuple[tuple[int, ...], ...]
    ) -> None:
        """Keep in memory what an answer has computed that loses its place; the rank holds its
        blocks until this returns. What takes too long is left out."""
        held = Held(sequence=SequenceId(""), tokens=len(token_ids), blocks=blocks)
        quick = [shelf for shelf in self.shelves if shelf.name == HOST]
        async with self._keeping:
            await self._copy(_Job(namespace, token_ids), held, quick)

    async def _copy(self, job: _Job, held: Held, onto: Sequence[Shelf]) -> bool:
        count = held.tokens // BLOCK_TOKENS
        until = self._clock() + HOLD_S
        wanted = wanted_blocks(self._fingerprint, job.namespace, job.token_ids[: held.tokens])
        owner, copied = self._owner(job.namespace), 0
        for index, one in enumerate(wanted):
            shelves = [s for s in onto if not s.off and one.digest not in s]
            if not shelves:
                continue
            if copied and self._clock() > until:
                return False
            copied += 1
            groups = self._groups(index, count)
            content = self._content(index, groups, held.blocks)
            entry = Entry(owner, *one, groups, xxh3_64_intdigest(content))
            for shelf in shelves:
                await shelf.keep(entry, content)
        return True

    def _groups(self, index: int, count: int) -> int:
        """The groups that have block `index` of a held start of `count` blocks."""
        here = (g for g, window in self._windows.items() if index >= first_seen(count, window))
        return sum(1 << group for group in here)

    def _content(self, index: int, groups: int, blocks: Sequence[Sequence[int]]) -> bytes:
        return b"".join(
            self._memory.block(part.rank, part.group, blocks[part.group][index])
            for part, _, _ in self._shape.spans(groups)
        )

    # ---------------------------------------------------------------- the rank, routers, the end

    def heard(self, message: Held | SequenceFailed) -> None:
        """Whatever the rank says of a sequence that may be ours."""
        ours = self._reply is not None and message.sequence == self._held_as
        if ours and self._reply is not None and not self._reply.done():
            self._reply.set_result(message)

    @property
    def places(self) -> int:
        """For blocks, on all shelves."""
        return sum(shelf.slots for shelf in self.shelves)

    def snapshot(self) -> list[pb.NodeMessage]:
        return self._known.snapshot()

    async def forget(self, namespace: str) -> dict[str, int]:
        """Everything of a namespace, for ever; how many blocks each tier had."""
        for digest, job in list(self._jobs.items()):
            if job.namespace == namespace:
                del self._jobs[digest]
        owner = self._owner(namespace)
        async with self._keeping:
            return {shelf.name: await shelf.forget(owner) for shelf in self.shelves}

    async def close(self) -> None:
        for shelf in self.shelves:
            await shelf.close()


async def _load(batch: Sequence[_Place]) -> list[bytes | None]:
    return await batch[0].shelf.load([one.kept for one in batch])


def _batches(places: Sequence[_Place]) -> list[list[_Place]]:
    """Neighbours on one shelf, `BATCH` at a time."""
    batches: list[list[_Place]] = []
    for place in places:
        last = batches[-1] if batches else []
        if last and len(last) < BATCH and last[0].shelf is place.shelf:
            last.append(place)
        else:
            batches.append([place])
    return batches
