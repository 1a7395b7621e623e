"""A runner without a model: it plays the prompt back out of real KV blocks.

Computing a token writes it into its cells of its block (`core.engine.cells`); sampling walks the
block table, proves that every cell from the first position on is what was computed there, and reads
the next token out of the cells of the prompt. So a block that is wrong, missing, stale or
overwritten anywhere in the system ends the request with an error instead of passing unnoticed.

Of a plan's ranks each writes its own slabs and proves them; all of them play the same text.

The text: prompt ids in order, without control ids, once (or for ever), then the end id; or, for
tests, ids of the prompt picked by the check, so that every token depends on all before it. A second
KV group with a window, likewise for tests, is written alike and proved as far as a token sees.
Pace: a fixed time a step, and a rate for tokens of prompts.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import xxhash

from core.engine.cells import SMALLEST, Broken, next_check, prove, rows
from core.engine.messages import RankConfig, ScriptedConfig
from core.engine.pending import Pending, accepted
from core.engine.plan import LoadedModel, Row, RowResult, StepPlan, StepResult, Work
from core.errors import ConfigError
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.memory import allocate
from core.parallel import ModelNumbers, Plan, kv_slice
from core.types import BLOCK_TOKENS

DEFAULT_CONTEXT = 8192
VOCAB_SIZE = 1 << 31
"""The tokenizer is the front's; a cell holds any id of 31 bits."""

_LINK = struct.Struct("<QI")
_UNPACED_PREFILL_TOKENS_PER_S = 100_000.0
_UNPACED_DECODE_TOKENS_PER_S = 1_000.0
_PROVED_BLOCKS = 8192


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that was computed when it was submitted, and ends at `due`."""

    outcome: StepResult
    began: float
    due: float
    timers: list[threading.Timer]

    def add_done_callback(self, done: Callable[[_Done], object], /) -> None:
        left = self.due - time.monotonic()
        if left <= 0:
            done(self)
            return
        self.timers[:] = [timer for timer in self.timers if timer.is_alive()]
        timer = threading.Timer(left, done, (self,))
        timer.daemon = True
        timer.start()
        self.timers.append(timer)

    def result(self) -> StepResult:
        left = self.due - time.monotonic()
        if left > 0:
            time.sleep(left)
        seconds = time.monotonic() - self.began
        return StepResult(self.outcome.number, self.outcome.rows, seconds)


class ScriptedRunner:
    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._script = config.scripted or ScriptedConfig()
        self._geometry = KVGeometry(groups=(), blocks=())
        self._silent = frozenset((*self._script.skip_ids, self._script.end_id))
        self._memory: mmap.mmap | None = None
        self._descriptor = -1
        self._last_due = 0.0
        self._timers: list[threading.Timer] = []
        self._pending = Pending()
        self._proved: OrderedDict[bytes, tuple[int, tuple[int, ...]]] = OrderedDict()

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Raises ConfigError when the block size does not hold 16 cells."""
        config, script = self._config, self._script
        self._geometry = geometry = shard(
            scripted_geometry(script, config.kv_blocks), config.plan, config.rank
        )
        progress("memory", 0.0)
        self._descriptor, self._memory = allocate(geometry.pool_bytes)
        progress("memory", 1.0)
        shape = f"{script.block_bytes} {script.layers} {script.kv_heads}"
        identity = f"scripted {config.source} {shape}".encode()
        return LoadedModel(
            fingerprint=blake2b(identity, digest_size=16).digest(),
            context=config.context or DEFAULT_CONTEXT,
            vocab_size=VOCAB_SIZE,
            geometry=geometry,
            memory_fd=self._descriptor,
            prefill_tokens_per_s=script.prefill_tokens_per_s or _UNPACED_PREFILL_TOKENS_PER_S,
            decode_tokens_per_s=1 / script.step_s
            if script.step_s
            else _UNPACED_DECODE_TOKENS_PER_S,
        )

    def submit(self, plan: StepPlan) -> _Done:
        began = time.monotonic()
        whole, broken = self._pending.resolve(plan.rows)
        rows = (*broken, *(self._row(row) for row in whole))
        self._pending.note(rows)
        pace = self._script.step_s
        if self._script.prefill_tokens_per_s:
            prompt = sum(len(row.token_ids) for row in plan.rows if not row.decodes)
            pace += prompt / self._script.prefill_tokens_per_s
        self._last_due = max(began, self._last_due) + pace
        return _Done(StepResult(plan.number, rows, 0.0), began, self._last_due, self._timers)

    def work(self) -> Work:
        """A rank alone sends nothing."""
        return Work()

    def close(self) -> None:
        """Give the memory back. Idempotent; the front's mapping of it stays valid."""
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            os.close(self._descriptor)

    # -------------------------------------------------------------- inside

    def _row(self, row: Row) -> RowResult:
        blocks = row.block_tables[0]
        try:
            check, before = self._prove(blocks, row.start)
            if self._script.window:
                self._prove_window(row, before)
        except Broken as broken:
            return RowResult(row.sequence, error=str(broken))
        checks = self._checks(row.start, check, row.token_ids)
        for index, table in enumerate(row.block_tables):
            self._write(index, table, row.start, row.token_ids, checks)
        if row.sample is None:
            return RowResult(row.sequence)
        tokens = [*before, *row.token_ids]
        known = len(tokens) - row.drafts
        prompt = tokens[: known - row.sample.position]
        drawn = [
            self._next(prompt, row.sample.position + n, checks[len(checks) - 1 - row.drafts + n])
            for n in range(row.drafts + 1)
        ]
        return RowResult(row.sequence, token_ids=accepted(row, drawn))

    def _next(self, prompt: list[int], position: int, check: int) -> int:
        """The token at output `position`, after a token with this `check`."""
        played = [one for one in prompt if one not in self._silent]
        if self._script.scramble:
            return scrambled(played, check, self._script.end_id)
        if position < len(played):
            return played[position]
        if self._script.repeat and played:
            return played[position % len(played)]
        return self._script.end_id

    def _prove_window(self, row: Row, before: list[int]) -> None:
        """The cells of the window group that the row's first token sees. Raises Broken."""
        first = max(0, row.start - self._script.window + 1)
        check = 0
        for position, token_id in enumerate(before):
            check = next_check(check, token_id, position)
            if position >= first:
                self._compare(row.block_tables[1], position, token_id, check)

    def _compare(self, blocks: tuple[int, ...], position: int, token_id: int, check: int) -> None:
        group = self._geometry.groups[1]
        block, cell = divmod(position, BLOCK_TOKENS)
        data = self._block(blocks[block], 1)
        starts = range(cell * group.head_dim, len(data), group.slab_bytes)
        for at, found in zip(starts, rows(group, (token_id,), (check,), position), strict=True):
            if data[at : at + len(found)] != found:
                raise Broken(position)

    def _prove(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, list[int]]:
        """Check of the last of the first `tokens` positions, and their ids. Raises Broken."""
        check = 0
        ids: list[int] = []
        for start in range(0, tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, tokens - start)
            data = self._block(blocks[start // BLOCK_TOKENS])
            if count < BLOCK_TOKENS:
                check, found = prove(self._geometry.groups[0], data, start, count, check)
            else:
                check, found = self._prove_block(data, start, check)
            ids.extend(found)
        return check, ids

    def _prove_block(self, data: bytes, start: int, check: int) -> tuple[int, tuple[int, ...]]:
        """`prove` of a full block, remembered by content: each step reads all of them."""
        key = xxhash.xxh3_128_digest(data) + _LINK.pack(check, start)
        proved = self._proved.get(key)
        if proved is None:
            group = self._geometry.groups[0]
            proved = self._proved[key] = prove(group, data, start, BLOCK_TOKENS, check)
            if len(self._proved) > _PROVED_BLOCKS:
                self._proved.popitem(last=False)
        else:
            self._proved.move_to_end(key)
        return proved

    def _checks(self, start: int, check: int, token_ids: tuple[int, ...]) -> list[int]:
        """The check of each position, after `check`."""
        checks: list[int] = []
        for position, token_id in enumerate(token_ids, start=start):
            check = next_check(check, token_id, position)
            checks.append(check)
        return checks

    def _write(
        self, index: int, blocks: tuple[int, ...], start: int,
        token_ids: tuple[int, ...], checks: list[int],
    ) -> None:  # fmt: skip
        """The cells of group `index` that hold `token_ids`."""
        memory, group = self._mapped(), self._geometry.groups[index]
        end = start + len(token_ids)
        at = start
        while at < end:
            block, cell = divmod(at, BLOCK_TOKENS)
            until = min(end, (block + 1) * BLOCK_TOKENS)
            part = slice(at - start, until - start)
            place, _ = self._geometry.block_span(index, blocks[block])
            place += cell * group.head_dim
            for row in rows(group, token_ids[part], checks[part], at):
                memory[place : place + len(row)] = row
                place += group.slab_bytes
            at = until

    def _block(self, block: int, group: int = 0) -> bytes:
        start, end = self._geometry.block_span(group, block)
        return self._mapped()[start:end]

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise ConfigError("a step was submitted before the runner was loaded")
        return self._memory


def scripted_geometry(script: ScriptedConfig, blocks: int) -> KVGeometry:
    """One group whose blocks are `block_bytes` long, and with a window a second one, unsplit.
    Raises ConfigError when that cannot be."""
    slabs = 2 * script.layers * script.kv_heads
    size, rest = divmod(script.block_bytes, slabs * BLOCK_TOKENS)
    if rest or size < SMALLEST:
        raise ConfigError(
            f"scripted block_bytes is {script.block_bytes}; it must be a multiple of "
            f"{slabs * BLOCK_TOKENS} and at least {slabs * BLOCK_TOKENS * SMALLEST}"
        )
    group = KVGroup(
        name="script",
        layers=script.layers,
        kv_heads=script.kv_heads,
        head_dim=size,
        dtype="uint8",
    )
    if not script.window:
        return KVGeometry(groups=(group,), blocks=(blocks,))
    second = msgspec.structs.replace(group, name="window", kind="window", window=script.window)
    return KVGeometry(groups=(group, second), blocks=(blocks, script.window_blocks))


def shard(whole: KVGeometry, plan: Plan, rank: int) -> KVGeometry:
    """What one rank of a plan holds of it."""
    place = plan.place(rank)

    def part(group: KVGroup) -> KVGroup:
        first, last = (group.layers * stage // plan.pp for stage in (place.stage, place.stage + 1))
        numbers = ModelNumbers(group.layers, group.kv_heads, group.kv_heads, 1, 1)
        head, heads = kv_slice(numbers, plan, place.tp_rank)
        return msgspec.structs.replace(
            group, first_layer=first, layers=last - first, first_head=head, kv_heads=heads
        )

    return KVGeometry(groups=tuple(map(part, whole.groups)), blocks=whole.blocks)


def scrambled(played: list[int], check: int, end_id: int) -> int:
    """One of `played`, or now and then the end, as `check` says."""
    at = check % (4 * len(played) + 1)
    return played[at % len(played)] if at < 4 * len(played) else end_id
