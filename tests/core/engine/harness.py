"""An engine and its front in one process: plays schedules and holds them to the solo text."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

from core.engine.cells import fill_blocks, next_check
from core.engine.engine import Engine
from core.engine.lending_messages import Adopt, Held, Hold, Import
from core.engine.messages import (
    Abort,
    Begin,
    Command,
    Prefill,
    RankConfig,
    Release,
    Reserve,
    Reserved,
    Run,
    ScriptedConfig,
    SequenceFailed,
    SequenceSpec,
    Stepped,
)
from core.engine.plan import SequenceId, StepPlan
from core.engine.scripted import ScriptedRunner, scrambled, scripted_geometry
from core.kv.memory import attach
from core.types import FinishReason
from tests.core.engine.late import LateRunner
from tests.core.engine.watched import END, Prophet, Watched

BLOCK_BYTES = 256
GROUP = scripted_geometry(ScriptedConfig(block_bytes=BLOCK_BYTES), 1).groups[0]


def rank_config(
    *, blocks: int, context: int = 512, sequences: int = 8, step_tokens: int = 64,
    repeat: bool = False, step_s: float = 0.0, block_bytes: int = BLOCK_BYTES,
    scramble: bool = False, window: int = 0, window_blocks: int = 0,
) -> RankConfig:  # fmt: skip
    return RankConfig(
        node="n",
        socket_fd=-1,
        engine="scripted",
        source="nowhere",
        context=context,
        kv_blocks=blocks,
        max_sequences=sequences,
        max_step_tokens=step_tokens,
        scripted=ScriptedConfig(
            end_id=END,
            repeat=repeat,
            scramble=scramble,
            step_s=step_s,
            block_bytes=block_bytes,
            window=window,
            window_blocks=window_blocks,
        ),
    )


def spec(
    prompt: list[int] | range, *, max_tokens: int = 1000, outputs: tuple[int, ...] = (),
    priority: int = 0, namespace: str = "", stop: frozenset[int] = frozenset({END}),
    deadline_s: float | None = None, move: int = 0, keep: bool = False,
) -> SequenceSpec:  # fmt: skip
    return SequenceSpec(
        token_ids=tuple(prompt),
        output_ids=outputs,
        max_tokens=max_tokens,
        stop_ids=stop,
        priority=priority,
        namespace=namespace,
        deadline_s=deadline_s,
        move_min_tokens=move,
        keep_blocks=keep,
    )


def solo(
    wanted: SequenceSpec, *, context: int, repeat: bool = False, scramble: bool = False
) -> tuple[list[int], FinishReason]:
    """What the script says for this sequence, worked out without an engine."""
    played = [one for one in wanted.token_ids if one != END]
    out = list(wanted.output_ids)
    check = 0
    for position, token in enumerate((*wanted.token_ids, *out)):
        check = next_check(check, token, position)
    while True:
        if out and out[-1] in wanted.stop_ids:
            return out[len(wanted.output_ids) :], FinishReason.STOP
        if len(out) >= wanted.max_tokens or len(wanted.token_ids) + len(out) >= context:
            return out[len(wanted.output_ids) :], FinishReason.LENGTH
        at = len(out)
        if scramble:
            out.append(scrambled(played, check, END))
            check = next_check(check, out[-1], len(wanted.token_ids) + at)
        elif at < len(played) or (repeat and played):
            out.append(played[at % len(played)])
        else:
            out.append(END)


class Front:
    """Drives one engine; checks every message and all books after every step."""

    def __init__(
        self,
        config: RankConfig,
        *,
        depth: int = 1,
        stages: int = 1,
        prophet: random.Random | None = None,
    ) -> None:
        self.config = config
        self.now = 0.0
        self.runner = LateRunner(ScriptedRunner(config))
        loaded = self.runner.load(None)
        self.geometry = loaded.geometry
        self.memory: mmap.mmap = attach(loaded.memory_fd, loaded.geometry.pool_bytes)
        self.engine = Engine(
            loaded,
            self.runner,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
            depth=depth,
            stages=stages,
            drafter=None if prophet is None else lambda: Prophet(self, prophet),
            clock=lambda: self.now,
        )
        self.context = self.engine.scheduler.context
        self.script = config.scripted or ScriptedConfig()
        self.all: dict[str, Watched] = {}
        self.mirror: set[bytes] = set()
        self.stats = self.engine.stats()
        self.steps = 0
        self.guesses = 0
        self.follows = 0

    def close(self) -> None:
        self.memory.close()
        self.runner.close()

    def send(self, command: Command) -> None:
        self.engine.handle(command)
        self.read()

    def run(self, name: str, wanted: SequenceSpec) -> Watched:
        self.all[name] = Watched(wanted, "run")
        self.send(Run(SequenceId(name), wanted))
        return self.all[name]

    def reserve(self, name: str, wanted: SequenceSpec) -> Watched:
        self.all[name] = Watched(wanted, "reserve")
        self.send(Reserve(SequenceId(name), wanted))
        return self.all[name]

    def prefill(self, name: str, wanted: SequenceSpec) -> Watched:
        self.all[name] = Watched(wanted, "prefill")
        self.send(Prefill(SequenceId(name), wanted))
        return self.all[name]

    def begin(self, name: str, *, in_place: bool = True) -> None:
        watched = self.all[name]
        reserved = watched.reserved
        assert reserved is not None
        if in_place:
            tokens = (*watched.spec.token_ids, *watched.spec.output_ids)[:-1]
            self._fill(reserved, tokens)
            watched.seen = len(tokens)
        watched.stage = "queued"
        self.send(Begin(SequenceId(name), in_place))

    def bring(self, name: str, wanted: SequenceSpec) -> Watched:
        """Import the whole blocks of a prompt."""
        self.all[name] = Watched(wanted, "import")
        self.send(
            Import(
                sequence=SequenceId(name),
                token_ids=wanted.token_ids,
                namespace=wanted.namespace,
                priority=wanted.priority,
            )
        )
        return self.all[name]

    def adopt(self, name: str, tokens: int) -> None:
        """Fill so many of an import's tokens, and nothing after them."""
        watched = self.all[name]
        assert watched.reserved is not None
        self._fill(watched.reserved, watched.spec.token_ids[:tokens])
        watched.stage = "done"
        self.send(Adopt(SequenceId(name), tokens))

    def hold(self, name: str, wanted: SequenceSpec) -> Watched:
        self.all[name] = Watched(wanted, "hold")
        self.send(
            Hold(sequence=SequenceId(name), token_ids=wanted.token_ids, namespace=wanted.namespace)
        )
        return self.all[name]

    def _fill(self, reserved: Reserved, tokens: Sequence[int]) -> None:
        content = fill_blocks(GROUP, tokens)
        for group, fill in enumerate(reserved.fill):
            for index, block in fill.items():
                if index < len(content):
                    self.write(block, content[index], group)

    def _check_held(self, watched: Watched) -> None:
        """What is kept is what was computed, or brought, for these tokens."""
        held = watched.held
        assert held is not None
        assert held.tokens % 16 == 0
        content = fill_blocks(GROUP, watched.spec.token_ids[: held.tokens])
        assert [self.read_block(block) for block in held.blocks[0]] == content
        self._check_window(held.blocks, held.tokens, content)

    def release(self, name: str) -> None:
        if self.all[name].kind == "hold":
            self._check_held(self.all[name])
        self.all[name].stage = "done"
        self.send(Release(SequenceId(name)))

    def part(self, name: str) -> None:
        """The blocks of one that was given back have been copied."""
        self.all[name].stage = "moved"
        self.send(Release(SequenceId(name)))

    def abort(self, name: str) -> None:
        self.all[name].stage = "aborted"
        self.send(Abort(SequenceId(name)))

    def named(self, stage: str) -> list[str]:
        return [name for name, watched in self.all.items() if watched.stage == stage]

    def step(self) -> bool:
        before = len(self.runner.plans)
        busy = self.engine.step()
        for plan in list(self.runner.plans)[before:]:
            self._note(plan)
        self.steps += busy
        self.read()
        self.engine.scheduler.roster.check_integrity()
        return busy

    def settle(self, *, at_most: int = 5000) -> None:
        """Step until nothing can be computed."""
        for _ in range(at_most):
            if not self.step():
                return
        raise AssertionError(f"still busy after {at_most} steps: {self.named('queued')}")

    def finish_all(self) -> None:
        """Serve everybody to the end and see that nothing is left behind."""
        self.settle()  # of somebody who has left, a row may be in flight
        stages = ("reserved", "held", "queued", "parting")
        while any(self.named(stage) for stage in stages):
            self.settle()
            waiting = [*self.named("reserved"), *self.named("held"), *self.named("parting")]
            assert waiting or not self.named("queued"), "the engine sleeps on waiting sequences"
            for name in self.named("reserved"):
                if self.all[name].kind == "import":
                    self.adopt(name, len(self.all[name].spec.token_ids))
                else:
                    self.begin(name)
            for name in self.named("held"):
                self.release(name)
            for name in self.named("parting"):
                self.part(name)
        assert self.stats.running == self.stats.waiting == self.stats.blocks_used == 0
        assert self.stats.prefill_backlog_tokens == 0
        assert self.guesses >= self.stats.drafted_tokens >= self.stats.accepted_tokens
        self.check_texts()

    def solo(self, wanted: SequenceSpec) -> tuple[list[int], FinishReason]:
        script = self.script
        return solo(wanted, context=self.context, repeat=script.repeat, scramble=script.scramble)

    def check_texts(self) -> None:
        for name, watched in self.all.items():
            text, finish = self.solo(watched.spec)
            if watched.kind in ("prefill", "import", "hold"):
                assert not watched.tokens
            elif watched.stage == "done":
                assert (watched.tokens, watched.finish) == (text, finish), name
                assert watched.computed is not None
            else:
                assert watched.tokens == text[: len(watched.tokens)], name
            if watched.stage == "failed" and watched.code == "deadline_exceeded":
                assert watched.spec.deadline_s is not None
            elif watched.stage == "failed":
                assert watched.kind in ("reserve", "import")
                assert watched.code == "no_capacity", f"{name}: {watched.message}"

    def read(self) -> None:
        """Take the engine's messages as a front would."""
        stepped = 0
        for message in self.engine.messages():
            match message:
                case Reserved(sequence=name):
                    self.all[name].reserved = message
                    self.all[name].seen = message.cached_tokens
                    self.all[name].stage = "reserved"
                case Held(sequence=name):
                    self.all[name].held = message
                    self.all[name].stage = "held"
                    self._check_held(self.all[name])
                case SequenceFailed(name, code, text):
                    assert self.all[name].stage in ("queued", "reserved")
                    watched = self.all[name]
                    watched.stage, watched.code, watched.message = "failed", code, text
                case Stepped():
                    stepped += 1
                    self._stepped(message)
        assert stepped <= 1

    def read_block(self, block: int, group: int = 0) -> bytes:
        start, end = self.geometry.block_span(group, block)
        return self.memory[start:end]

    def write(self, block: int, content: bytes, group: int = 0) -> None:
        start, end = self.geometry.block_span(group, block)
        self.memory[start:end] = content

    def _stepped(self, message: Stepped) -> None:
        self.stats = message.stats
        for digest in message.evicted:
            self.mirror.remove(digest)
        for digest in message.stored:
            assert digest not in self.mirror
            self.mirror.add(digest)
        cache = self.engine.scheduler.blocks.cache
        assert self.mirror == {entry.digest for entry in cache.entries()}
        for output in message.outputs:
            watched = self.all[output.sequence]
            assert watched.stage == "queued", f"{output.sequence} speaks while {watched.stage}"
            if output.computed_tokens is not None:
                assert not watched.tokens
                assert output.computed_tokens == watched.counted
                watched.computed = output.computed_tokens
            watched.tokens.extend(output.token_ids)
            if output.finish is not None:
                watched.stage, watched.finish = "done", output.finish
        for given in message.given_back:
            watched = self.all[given.sequence]
            assert watched.stage == "queued"
            assert watched.spec.move_min_tokens > 0
            watched.stage = "parting" if given.tokens else "moved"
            tokens = (*watched.spec.token_ids, *watched.spec.output_ids, *watched.tokens)
            content = fill_blocks(GROUP, tokens[: given.tokens])
            if given.tokens:
                assert [self.read_block(block) for block in given.blocks[0]] == content
                self._check_window(given.blocks, given.tokens, content)
            if watched.computed is None:
                assert given.computed_tokens == watched.counted
                watched.computed = given.computed_tokens
        for progress in message.progress:
            watched = self.all[progress.sequence]
            tokens = (*watched.spec.token_ids, *watched.spec.output_ids)[:-1]
            assert progress.complete == (progress.ready_tokens == len(tokens))
            watched.told = watched.told or progress.blocks[0]
            assert progress.blocks[0] == watched.told, "a prefill's blocks changed"
            if progress.complete:
                assert progress.computed_tokens == watched.counted
            content = fill_blocks(GROUP, tokens[: progress.ready_tokens])
            for index in range(progress.ready_tokens // 16):
                assert self.read_block(progress.blocks[0][index]) == content[index]
            if progress.complete:
                watched.stage = "held"
                self._check_window(progress.blocks, len(tokens), content)

    def _check_window(
        self, blocks: tuple[tuple[int, ...], ...], count: int, content: list[bytes]
    ) -> None:
        """What the token after the first `count` sees is there in the window group."""
        if self.script.window:
            for index in range(max(0, count - self.script.window + 1) // 16, count // 16):
                assert self.read_block(blocks[1][index], 1) == content[index]

    def _note(self, plan: StepPlan) -> None:
        assert plan.tokens <= self.config.max_step_tokens
        assert len(plan.rows) <= self.config.max_sequences
        for row in plan.rows:
            watched = self.all[row.sequence]
            end = row.start + len(row.token_ids) - row.drafts
            for table in row.block_tables:
                assert len(table) == -(-(end + row.drafts) // 16)
            self.guesses += row.drafts
            self.follows += row.follows
            if not watched.tokens:
                prompt = len(watched.spec.token_ids)
                known = max(watched.seen, row.start)
                watched.counted += max(0, min(end, prompt) - known)
                watched.seen = max(watched.seen, end)
