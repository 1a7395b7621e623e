"""A rank with a real scheduler and a scripted runner, in the process of the test."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable

import msgspec

from core.engine import messages as m
from core.engine.engine import Engine
from core.engine.plan import LoadedModel, StepPlan
from core.engine.scripted import ScriptedRunner
from core.kv.memory import attach
from core.kv.shards import PoolMemory
from core.kv.transports.base import BlockMemory
from core.parallel import Plan
from tests.regional.node.fake_rank import END


def rank_config(
    *, blocks: int = 64, step_tokens: int = 48, window: int = 0, shards: int = 1
) -> m.RankConfig:
    """`shards`: tensor-parallel ranks of the pool. Answers depend on every token before them."""
    return m.RankConfig(
        node="n",
        plan=Plan(tp=shards),
        socket_fd=-1,
        engine="scripted",
        source="nowhere",
        context=1024,
        kv_blocks=blocks,
        max_sequences=8,
        max_step_tokens=step_tokens,
        scripted=m.ScriptedConfig(
            end_id=END,
            scramble=True,
            block_bytes=1024,
            kv_heads=2,
            window=window,
            window_blocks=blocks if window else 0,
        ),
    )


class _Shards:
    """The runner of a pool: each of its ranks computes, writes and proves its own part."""

    def __init__(self, config: m.RankConfig) -> None:
        self.runners = [
            ScriptedRunner(msgspec.structs.replace(config, rank=rank))
            for rank in range(config.plan.ranks)
        ]
        self.work = self.runners[0].work

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        self.loaded = [one.load(progress) for one in self.runners]
        return self.loaded[0]

    def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def] # the handle is scripted's own
        handles = [one.submit(plan) for one in self.runners]
        results = [one.result() for one in handles]
        broken = [row for one in results for row in one.rows if row.error]
        assert not broken, f"a rank read KV that was never computed so: {broken}"
        return handles[0]

    def close(self) -> None:
        for one in self.runners:
            one.close()


class EngineRank:
    """What is said to it and what it says arrives with the next turn of the loop, in order.
    `hop` is told of each; a frozen one takes nothing and computes nothing until it thaws."""

    def __init__(self, config: m.RankConfig, hop: Callable[[str], None]) -> None:
        self.receive: Callable[[m.RankMessage], None] = lambda _: None
        self.commands: list[m.Command] = []
        self.frozen = False
        self.fault: Exception | None = None
        """What must never happen in a rank did."""
        self._hop = hop
        self._runner = _Shards(config)
        self._loop = asyncio.get_running_loop()
        loaded = self._runner.load(lambda _stage, _fraction: None)
        self.fingerprint = loaded.fingerprint
        self.engine = Engine(
            loaded,
            self._runner,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
        )
        self._memory: list[mmap.mmap] = [
            attach(one.memory_fd, one.geometry.pool_bytes) for one in self._runner.loaded
        ]
        self.memory = PoolMemory(
            {
                rank: BlockMemory(one.geometry, memory, one.memory_fd)
                for rank, (one, memory) in enumerate(
                    zip(self._runner.loaded, self._memory, strict=True)
                )
            }
        )
        self._inbox: list[m.Command] = []
        self._turn: asyncio.Handle | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._runner.close()

    @property
    def used(self) -> int:
        """Blocks that sequences hold; all books are compared."""
        if self.fault is not None:
            raise self.fault
        self.engine.scheduler.roster.check_integrity()
        return self.engine.scheduler.blocks.used

    def send(self, command: m.Command) -> None:
        self._hop(f"front>rank {type(command).__name__}")
        self.commands.append(command)
        self._inbox.append(command)
        self.wake()

    def wake(self) -> None:
        if self._turn is None and not self.frozen and not self._closed:
            self._turn = self._loop.call_soon(self._live)

    def _live(self) -> None:
        """Take what has been said, compute a step, say what there is."""
        self._turn = None
        if self.frozen or self._closed:
            return
        inbox, self._inbox = self._inbox, []
        try:
            for command in inbox:
                self.engine.handle(command)
            busy = self.engine.step()
        except Exception as error:
            self.fault = error
            raise
        for message in self.engine.messages():
            self._hop(f"rank>front {type(message).__name__}")
            if not self._closed:
                self.receive(message)
        if busy or self._inbox:
            self.wake()
