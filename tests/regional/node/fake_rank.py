"""A rank in the process of the test."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass

from core.engine import messages as m
from core.engine.plan import SequenceId
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.transports.base import BlockMemory
from core.types import (
    BLOCK_TOKENS,
    FinishReason,
)

END = 256
GEOMETRY = KVGeometry(
    groups=(
        KVGroup(name="full", layers=1, kv_heads=1, head_dim=8, dtype="float32"),
        KVGroup(name="other", layers=1, kv_heads=1, head_dim=4, dtype="float32"),
    ),
    blocks=(64, 64),
)


@dataclass
class _Held:
    spec: m.SequenceSpec
    blocks: list[list[int]]
    """Per group."""
    computed: int = 0
    generated: int = 0
    running: bool = False
    prefill: bool = False
    reported: bool = False
    spoken: bool = False


class FakeRank:
    """Writes prompts into real memory and, before it generates from a filled reservation, proves
    that every missing block arrived as the prompt demands. Steps whenever it has work.

    `script`: what every sequence answers. `cached`: blocks of any prompt that it claims to hold.
    `stall_at`: prefills stop there until it is raised. `pause`: nothing is stepped.
    """

    def __init__(self, memory: bytearray) -> None:
        self.script: list[int] = [*b"hello", END]
        self.per_step = 1
        self.chunk = 32
        self.cached = 0
        self.stall_at = 1 << 30
        self.paused = False
        self.mute_reserve = False
        self.commands: list[m.Command] = []
        self.receive: Callable[[m.RankMessage], None] = lambda _: None
        self._memory = BlockMemory(GEOMETRY, memory)
        self._free = [list(range(count)) for count in GEOMETRY.blocks]
        self._held: dict[SequenceId, _Held] = {}
        self._turn: asyncio.Handle | None = None

    @property
    def held(self) -> int:
        """Sequences that hold anything; when 0, every block is free."""
        if not self._held:
            assert [len(free) for free in self._free] == list(GEOMETRY.blocks)
        return len(self._held)

    def fail(self, sequence: str, code: str) -> None:
        self._drop(SequenceId(sequence))
        self.receive(m.SequenceFailed(SequenceId(sequence), code, "as the test asked"))

    def give_back(self, sequence: str, *, cached: int = 0, read: int | None = None) -> None:
        """As when its blocks went to another; by default it has computed its whole prompt by then.
        Else it has come so far, after what it found in its cache."""
        spec = self._held[SequenceId(sequence)].spec
        read = len(spec.token_ids) if read is None else read
        self._drop(SequenceId(sequence))
        given = m.GivenBack(
            sequence=SequenceId(sequence), computed_tokens=read - cached, read_tokens=read
        )
        self.receive(m.Stepped(given_back=(given,), stats=self.stats()))

    def resume(self) -> None:
        self.paused = False
        self.stall_at = 1 << 30
        self._wake()

    def send(self, command: m.Command) -> None:
        self.commands.append(command)
        match command:
            case m.Run(sequence, spec):
                held = self._take(sequence, spec)
                held.computed = self.cached * BLOCK_TOKENS
                held.running = True
            case m.Reserve(sequence, spec):
                held = self._take(sequence, spec)
                if not self.mute_reserve:
                    self._reserved(sequence, held)
            case m.Begin(sequence, _):
                held = self._held[sequence]
                self._prove(held)
                held.computed = len(held.spec.token_ids) - 1
                held.running = True
            case m.Prefill(sequence, spec):
                held = self._take(sequence, spec)
                held.prefill = True
                held.computed = self.cached * BLOCK_TOKENS
                self._fill(held, range(self.cached))
            case m.Release(sequence) | m.Abort(sequence):
                self._drop(sequence)
            case m.Shutdown():
                self._held.clear()
        self._wake()

    def _take(self, sequence: SequenceId, spec: m.SequenceSpec) -> _Held:
        assert sequence not in self._held
        count = -(-(len(spec.token_ids) - 1) // BLOCK_TOKENS)
        blocks = [[free.pop() for _ in range(count)] for free in self._free]
        held = self._held[sequence] = _Held(spec, blocks, generated=len(spec.output_ids))
        return held

    def _drop(self, sequence: SequenceId) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            for group, blocks in enumerate(held.blocks):
                for block in blocks:
                    self._memory.block(group, block)[:] = bytes(GEOMETRY.groups[group].block_bytes)
                self._free[group].extend(blocks)

    def _reserved(self, sequence: SequenceId, held: _Held) -> None:
        fill = tuple(
            {index: block for index, block in enumerate(blocks) if index >= self.cached}
            for blocks in held.blocks
        )
        reply = m.Reserved(sequence=sequence, cached_tokens=self.cached * BLOCK_TOKENS, fill=fill)
        asyncio.get_running_loop().call_soon(self.receive, reply)

    def _content(self, held: _Held, group: int, index: int) -> bytes:
        start = index * BLOCK_TOKENS
        ids = held.spec.token_ids[: len(held.spec.token_ids) - 1][start : start + BLOCK_TOKENS]
        seed = struct.pack(f"<{len(ids)}I", *ids) + bytes([group])
        size = GEOMETRY.groups[group].block_bytes
        return (seed * (size // len(seed) + 1))[:size]

    def _fill(self, held: _Held, indices: range) -> None:
        for group, blocks in enumerate(held.blocks):
            for index in indices:
                self._memory.block(group, blocks[index])[:] = self._content(held, group, index)

    def _prove(self, held: _Held) -> None:
        for group, blocks in enumerate(held.blocks):
            for index, block in enumerate(blocks):
                if index >= self.cached:
                    found = bytes(self._memory.block(group, block))
                    assert found == self._content(held, group, index), (group, index)

    def _wake(self) -> None:
        if self._turn is None and not self.paused and self._busy():
            self._turn = asyncio.get_running_loop().call_soon(self._step)

    def _busy(self) -> bool:
        return any(
            one.running or (one.prefill and not one.reported and one.computed < self.stall_at)
            for one in self._held.values()
        )

    def _step(self) -> None:
        self._turn = None
        outputs: list[m.TokenOutput] = []
        progress: list[m.PrefillProgress] = []
        for sequence, held in list(self._held.items()):
            if held.running:
                outputs.append(self._generate(sequence, held))
            elif held.prefill and not held.reported:
                report = self._read(sequence, held)
                if report is not None:
                    progress.append(report)
        self.receive(
            m.Stepped(outputs=tuple(outputs), progress=tuple(progress), stats=self.stats())
        )
        self._wake()

    def _generate(self, sequence: SequenceId, held: _Held) -> m.TokenOutput:
        first = None
        if not held.spoken:
            held.spoken = True
            first = len(held.spec.token_ids) - held.computed
        room = min(self.per_step, held.spec.max_tokens - held.generated)
        ids: list[int] = []
        finish: FinishReason | None = None
        for token in itertools.islice(self.script, held.generated, held.generated + room):
            ids.append(token)
            if token in held.spec.stop_ids:
                finish = FinishReason.STOP
                break
        held.generated += len(ids)
        if finish is None and held.generated >= held.spec.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._drop(sequence)
        return m.TokenOutput(
            sequence=sequence, token_ids=tuple(ids), finish=finish, computed_tokens=first
        )

    def _read(self, sequence: SequenceId, held: _Held) -> m.PrefillProgress | None:
        total = len(held.spec.token_ids) - 1
        before = held.computed
        held.computed = min(total, before + self.chunk, max(before, self.stall_at))
        complete = held.computed == total
        full = len(held.blocks[0]) if complete else held.computed // BLOCK_TOKENS
        self._fill(held, range(before // BLOCK_TOKENS, full))
        held.reported = complete
        return m.PrefillProgress(
            sequence=sequence,
            ready_tokens=held.computed,
            computed_tokens=held.computed - self.cached * BLOCK_TOKENS,
            complete=complete,
            blocks=tuple(tuple(blocks) for blocks in held.blocks),
        )

    def stats(self) -> m.EngineStats:
        return m.EngineStats(
            running=sum(one.running for one in self._held.values()),
            waiting=0,
            blocks_used=GEOMETRY.blocks[0] - len(self._free[0]),
            blocks_cached=0,
            blocks_total=GEOMETRY.blocks[0],
            prefill_backlog_tokens=0,
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=100.0,
            generated_tokens=0,
            computed_prompt_tokens=0,
            cached_prompt_tokens=0,
            preemptions=0,
        )
