"""A runner without a model: it plays the prompt back out of real KV blocks.

Computing a token writes it into its cell of its block; sampling walks the block table, proves that
every cell from the first position on is what was computed there, and reads the next token out of
the cells of the prompt. So a block that is wrong, missing, stale or overwritten anywhere in the
system ends the request with an error instead of passing unnoticed.

A cell is 1/16 of a block::

    token id (4 bytes) · position (4) · check (8) · the check again and again to the end

    check = xxh3-64(check of the position before, token id, position)

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

from core.engine.messages import RankConfig, ScriptedConfig
from core.engine.pending import Pending, accepted
from core.engine.plan import LoadedModel, Row, RowResult, StepPlan, StepResult
from core.errors import ConfigError
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.memory import allocate
from core.types import BLOCK_TOKENS

DEFAULT_CONTEXT = 8192
VOCAB_SIZE = 1 << 31
"""The tokenizer is the front's; a cell holds any id of 31 bits."""

_HEAD = struct.Struct("<IIQ")
_LINK = struct.Struct("<QII")
_UNPACED_PREFILL_TOKENS_PER_S = 100_000.0
_UNPACED_DECODE_TOKENS_PER_S = 1_000.0
_PROVED_BLOCKS = 8192


class _Broken(Exception):
    """A cell does not hold what was computed for its position."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the KV of position {position} is not what was computed there")


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
        self._block_bytes = self._script.block_bytes
        self._silent = frozenset((*self._script.skip_ids, self._script.end_id))
        self._memory: mmap.mmap | None = None
        self._descriptor = -1
        self._last_due = 0.0
        self._timers: list[threading.Timer] = []
        self._pending = Pending()
        self._window_offset = 0
        self._proved: OrderedDict[bytes, tuple[int, tuple[int, ...]]] = OrderedDict()

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Raises ConfigError when the block size does not hold 16 cells."""
        config, script = self._config, self._script
        geometry = scripted_geometry(
            script.block_bytes,
            config.kv_blocks,
            window=script.window,
            window_blocks=script.window_blocks,
        )
        self._window_offset = geometry.blocks[0] * script.block_bytes
        progress("memory", 0.0)
        self._descriptor, self._memory = allocate(geometry.pool_bytes)
        progress("memory", 1.0)
        identity = f"scripted {config.source} {script.block_bytes}".encode()
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
        except _Broken as broken:
            return RowResult(row.sequence, error=str(broken))
        checks = self._write(blocks, row.start, check, row.token_ids)
        if self._script.window:
            self._write_window(row, checks)
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
        """The cells of the window group that the row's first token sees. Raises _Broken."""
        first = max(0, row.start - self._script.window + 1)
        check = 0
        for position, token_id in enumerate(before):
            check = next_check(check, token_id, position)
            if position >= first:
                at, size = self._window_cell(row.block_tables[1], position)
                cell = make_cell(token_id, position, check, size)
                if self._mapped()[at : at + size] != cell:
                    raise _Broken(position)

    def _write_window(self, row: Row, checks: list[int]) -> None:
        memory = self._mapped()
        for n, (token_id, check) in enumerate(zip(row.token_ids, checks, strict=True)):
            at, size = self._window_cell(row.block_tables[1], row.start + n)
            memory[at : at + size] = make_cell(token_id, row.start + n, check, size)

    def _window_cell(self, blocks: tuple[int, ...], position: int) -> tuple[int, int]:
        """Where the cell lies, and its size."""
        size = self._block_bytes // BLOCK_TOKENS
        block, cell = divmod(position, BLOCK_TOKENS)
        return self._window_offset + blocks[block] * self._block_bytes + cell * size, size

    def _prove(self, blocks: tuple[int, ...], tokens: int) -> tuple[int, list[int]]:
        """Check of the last of the first `tokens` positions, and their ids. Raises _Broken."""
        check = 0
        ids: list[int] = []
        for start in range(0, tokens, BLOCK_TOKENS):
            count = min(BLOCK_TOKENS, tokens - start)
            data = self._block(blocks[start // BLOCK_TOKENS])
            if count < BLOCK_TOKENS:
                check, found = prove_cells(data, start, count, check)
            else:
                check, found = self._prove_block(data, start, check)
            ids.extend(found)
        return check, ids

    def _prove_block(self, data: bytes, start: int, check: int) -> tuple[int, tuple[int, ...]]:
        """`prove_cells` of a full block, remembered by content: each step reads all of them."""
        key = xxhash.xxh3_128_digest(data) + _LINK.pack(check, start, 0)
        proved = self._proved.get(key)
        if proved is None:
            proved = self._proved[key] = prove_cells(data, start, BLOCK_TOKENS, check)
            if len(self._proved) > _PROVED_BLOCKS:
                self._proved.popitem(last=False)
        else:
            self._proved.move_to_end(key)
        return proved

    def _write(
        self, blocks: tuple[int, ...], start: int, check: int, token_ids: tuple[int, ...]
    ) -> list[int]:
        """The check of each position."""
        checks: list[int] = []
        memory = self._mapped()
        size = self._block_bytes // BLOCK_TOKENS
        for position, token_id in enumerate(token_ids, start=start):
            check = next_check(check, token_id, position)
            checks.append(check)
            block, cell = divmod(position, BLOCK_TOKENS)
            at = blocks[block] * self._block_bytes + cell * size
            memory[at : at + size] = make_cell(token_id, position, check, size)
        return checks

    def _block(self, block: int) -> bytes:
        at = block * self._block_bytes
        return self._mapped()[at : at + self._block_bytes]

    def _mapped(self) -> mmap.mmap:
        if self._memory is None:
            raise ConfigError("a step was submitted before the runner was loaded")
        return self._memory


def scripted_geometry(
    block_bytes: int, blocks: int, *, window: int = 0, window_blocks: int = 0
) -> KVGeometry:
    """One group whose blocks are `block_bytes` long, and with `window` a second one. Raises
    ConfigError when that cannot be."""
    if block_bytes < BLOCK_TOKENS * _HEAD.size or block_bytes % (8 * BLOCK_TOKENS):
        raise ConfigError(
            f"scripted block_bytes is {block_bytes}; it must be a multiple of {8 * BLOCK_TOKENS} "
            f"and at least {BLOCK_TOKENS * _HEAD.size}"
        )
    group = KVGroup(
        name="script",
        layers=2,
        kv_heads=2,
        head_dim=block_bytes // (2 * 2 * 2 * BLOCK_TOKENS),
        dtype="uint8",
    )
    if not window:
        return KVGeometry(groups=(group,), blocks=(blocks,))
    second = msgspec.structs.replace(group, name="window", kind="window", window=window)
    return KVGeometry(groups=(group, second), blocks=(blocks, window_blocks))


def scrambled(played: list[int], check: int, end_id: int) -> int:
    """One of `played`, or now and then the end, as `check` says."""
    at = check % (4 * len(played) + 1)
    return played[at % len(played)] if at < 4 * len(played) else end_id


def next_check(check: int, token_id: int, position: int) -> int:
    return xxhash.xxh3_64_intdigest(_LINK.pack(check, token_id, position))


def make_cell(token_id: int, position: int, check: int, size: int) -> bytes:
    filler = check.to_bytes(8, "little") * (size // 8)
    return (_HEAD.pack(token_id, position, check) + filler)[:size]


def prove_cells(data: bytes, start: int, count: int, check: int) -> tuple[int, tuple[int, ...]]:
    """Read the first `count` cells of a block whose first position is `start`, after `check`: the
    check of the last one and the token ids. Raises when a cell is not what was computed."""
    size = len(data) // BLOCK_TOKENS
    ids: list[int] = []
    for cell in range(count):
        position = start + cell
        token_id, _, _ = _HEAD.unpack_from(data, cell * size)
        check = next_check(check, token_id, position)
        if data[cell * size : (cell + 1) * size] != make_cell(token_id, position, check, size):
            raise _Broken(position)
        ids.append(token_id)
    return check, tuple(ids)


def fill_blocks(token_ids: tuple[int, ...], block_bytes: int) -> list[bytes]:
    """The blocks that hold `token_ids` from position 0; the end of the last one is zero."""
    size = block_bytes // BLOCK_TOKENS
    cells: list[bytes] = []
    check = 0
    for position, token_id in enumerate(token_ids):
        check = next_check(check, token_id, position)
        cells.append(make_cell(token_id, position, check, size))
    return [
        b"".join(cells[start : start + BLOCK_TOKENS]).ljust(block_bytes, b"\0")
        for start in range(0, len(cells), BLOCK_TOKENS)
    ]
