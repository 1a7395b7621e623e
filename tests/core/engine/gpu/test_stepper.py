"""Steps that run ahead of the host give what steps one by one give: tokens, KV, errors.

With layers that read nothing of a step but its tensors, and a device that keeps what it captures
and gives it again, so that a graph that would need the host is found out.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.engine.gpu.device import HostDevice
from core.engine.gpu.stepper import DeviceStepper, Launched
from core.engine.plan import History, Row, SampleSpec, SequenceId, StepPlan, StepResult
from core.engine.stepper import Stepper, kv_geometry
from core.models.builder import build
from core.models.stage import Stage, whole_stage
from core.models.weights import open_weights
from kernels.ops import TorchOps
from tests.core.engine.gpu.ahead import AheadOps
from tests.core.models.families import FAMILIES, family_folder
from tests.core.models.tiny import GREEDY, prompt

BLOCKS = 64
ZERO, ONE, TWO = SequenceId("0"), SequenceId("1"), SequenceId("2")
RANDOM = replace(GREEDY, temperature=1.0, seed=5)


class Recording(HostDevice):
    """Graphs run on what lies in memory: nothing that a step tells may reach into them."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.refuses = False

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            run()

        return replay


class Pair:
    """The same plans, one by one on the host and ahead of it on a device."""

    def __init__(self, folder: Path, *, most: int = 8) -> None:
        source = open_weights(folder)
        host = build(source, ops=TorchOps(torch.float32))
        ahead = whole_stage(source, AheadOps(torch.float32))
        self.device = Recording()
        self.geometry = kv_geometry(host.config, "float32", BLOCKS)
        self.host = Stepper(host, self.geometry, self._memory())
        self.shared = self._memory()
        self.ahead = self._stepper(ahead, self.shared, most)
        self.stage = ahead
        self.graph = 0
        self._launched: list[Launched] = []
        self._expected: list[StepResult] = []

    def _memory(self) -> mmap.mmap:
        return mmap.mmap(-1, self.geometry.pool_bytes)

    def _stepper(self, stage: Stage, shared: mmap.mmap, most: int = 8) -> DeviceStepper:
        return DeviceStepper(stage, self.geometry, shared, self.device, most=most, context=256)

    def other(self) -> tuple[DeviceStepper, mmap.mmap]:
        """Another node with this model."""
        shared = self._memory()
        return self._stepper(self.stage, shared), shared

    def step(self, *rows: Row) -> None:
        plan = StepPlan(len(self._launched), rows)
        self._launched.append(self.ahead.launch(plan, self.graph))
        self._expected.append(self.host.step(plan))

    def land(self) -> list[dict[SequenceId, tuple[int, ...] | str]]:
        """What the steps gave by sequence, which must be the same on both."""
        found = []
        for launched, expected in zip(self._launched, self._expected, strict=True):
            result = self.ahead.land(launched)
            assert result.number == expected.number
            assert result.rows == expected.rows
            found.append({one.sequence: one.error or one.token_ids for one in result.rows})
        self._launched, self._expected = [], []
        return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: family_folder(root / name, config) for name, config in FAMILIES.items()}


def row(
    name: str,
    ids: Sequence[int],
    start: int,
    spec: SampleSpec | None = GREEDY,
    *,
    follows: bool = False,
) -> Row:
    """Each of ten sequences has six blocks of its own, in some order."""
    table = list(range(int(name) * 6, int(name) * 6 + 6))
    random.Random(name).shuffle(table)
    if spec is not None:
        spec = replace(spec, choice=int(name), position=start)
    used = -(-(start + len(ids)) // 16)
    return Row(SequenceId(name), tuple(ids), start, (tuple(table[:used]),), spec, follows=follows)


def follow(name: str, start: int, spec: SampleSpec = GREEDY) -> Row:
    return row(name, (0,), start, spec, follows=True)


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "deepseek_v3"])
def test_steps_ahead_of_the_host(family: str, folders: dict[str, Path]) -> None:
    """Prompts in chunks beside decode rows; then decode rows alone, by graphs once these are there;
    none of it has landed before all of it was given."""
    pair = Pair(folders[family])
    pair.step(row("0", prompt(20), 0), row("1", prompt(40), 0, None))
    pair.step(follow("0", 20), row("1", prompt(17), 40, RANDOM), row("2", prompt(3), 0, RANDOM))
    pair.step(follow("0", 21), follow("1", 57, RANDOM), follow("2", 3, RANDOM))
    pair.step(follow("2", 4, RANDOM), follow("0", 22))
    found = pair.land()
    assert [sorted(step) for step in found] == [
        ["0", "1"],
        ["0", "1", "2"],
        ["0", "1", "2"],
        ["0", "2"],
    ]
    pair.step(follow("1", 58, RANDOM), follow("2", 5, RANDOM), follow("0", 23))
    assert pair.device.replays == 0
    assert pair.ahead.capture(4)
    pair.graph = 4
    for step in range(3):
        pair.step(
            follow("2", 6 + step, RANDOM), follow("0", 24 + step), follow("1", 59 + step, RANDOM)
        )
    pair.step(follow("1", 62, RANDOM))  # one row in a graph of four
    assert (pair.device.captures, pair.device.replays) == (1, 4)
    pair.land()
    torch.testing.assert_close(
        pair.ahead.pool.groups[0], pair.host.pool.groups[0], atol=1e-4, rtol=0
    )


def test_steps_that_need_the_host_between_those_that_do_not(folders: dict[str, Path]) -> None:
    pair = Pair(folders["llama3"])
    ids = prompt(20)
    history = History(torch.tensor(ids, dtype=torch.int32).numpy().tobytes(), 20)
    penalised = replace(RANDOM, repetition_penalty=1.3, history=history)
    pair.step(row("0", ids, 0), row("1", prompt(9), 0, RANDOM))
    pair.step(follow("0", 20, penalised), follow("1", 9, RANDOM))
    pair.step(follow("0", 21), follow("1", 10, RANDOM))
    pair.step(follow("0", 22, replace(GREEDY, logprobs=3)), follow("1", 11, RANDOM))
    guessed = row("1", (5, 6, 7), 12, RANDOM)
    pair.step(replace(guessed, drafts=2), follow("0", 23))
    pair.step(follow("0", 24), follow("1", 13, RANDOM))
    found = pair.land()
    assert all(len(step[ZERO]) == 1 for step in found)


def test_rows_that_cannot_be_are_told_and_no_others(folders: dict[str, Path]) -> None:
    pair = Pair(folders["llama3"])
    pair.step(row("0", prompt(5), 0), row("1", (1, 400), 0), follow("2", 7))
    pair.step(follow("0", 5), follow("1", 2))
    pair.step()
    pair.step(follow("0", 6))
    found = pair.land()
    assert found[0][ONE] == "a token id is outside 0 … 319"
    assert found[0][TWO] == found[1][ONE] == "the step before gave no token"
    assert all(len(step[ZERO]) == 1 for step in (found[0], found[1], found[3]))


def test_a_token_that_was_unsound_ends_its_sequence_alone(folders: dict[str, Path]) -> None:
    """Also in the step that was given before anybody knew."""
    pair = Pair(folders["llama3"])
    pair.step(row("0", prompt(20), 0, None), row("1", prompt(20, 4), 0, None))
    pair.land()
    for pool in (pair.ahead.pool, pair.host.pool):
        pool.groups[0][row("0", prompt(20), 0).block_tables[0][0]] = float("nan")
    pair.step(row("0", (1,), 20), row("1", (1,), 20))
    pair.step(follow("0", 21), follow("1", 21))
    first, second = pair.land()
    assert first[ZERO] == "the model gave no finite logits"
    assert second[ZERO] == "the step before gave no token"
    assert len(first[ONE]) == len(second[ONE]) == 1


def test_blocks_are_handed_over_by_way_of_the_host(folders: dict[str, Path]) -> None:
    """One node reads a prompt, its front sends what lies in shared memory, another one decodes."""
    pair = Pair(folders["deepseek_v3"])
    ids = prompt(45)
    receiver, received = pair.other()
    pair.step(row("0", ids[:30], 0, None))
    pair.step(row("0", ids[30:44], 30, None))
    pair.land()
    received[:] = pair.shared[:]
    receiver.arrive([row("0", ids, 0).block_tables[0]])
    last = receiver.land(receiver.launch(StepPlan(0, (row("0", ids[44:], 44),))))
    pair.step(row("0", ids[44:], 44))
    assert pair.land()[0][ZERO] == last.rows[0].token_ids
    stale, _ = pair.other()
    lost = stale.land(stale.launch(StepPlan(0, (row("0", ids[44:], 44),))))
    assert lost.rows[0].token_ids != last.rows[0].token_ids


def test_prefixes_of_answers_are_on_the_host_block_by_block(folders: dict[str, Path]) -> None:
    """What a later prefill may find cached is in shared memory as soon as its block is full."""
    pair = Pair(folders["llama3"])
    table = row("0", prompt(32), 0).block_tables[0]

    def same() -> list[bool]:
        size = pair.geometry.groups[0].block_bytes
        own = pair.ahead.pool.groups[0]
        return [
            own[block].numpy().tobytes() == pair.shared[block * size : (block + 1) * size]
            for block in table
        ]

    pair.step(row("0", prompt(31), 0))
    pair.land()
    assert same() == [True, False]
    pair.step(follow("0", 31))
    pair.land()
    assert same() == [True, True]


def test_a_graph_that_cannot_be_captured_is_told(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(folders["llama3"])
    pair.device.refuses = True
    pair.step(row("0", prompt(3), 0))
    pair.step(follow("0", 3))
    pair.step(follow("0", 4))
    assert not pair.ahead.capture(1)
    assert "1 rows go without a graph: operation not permitted" in caplog.text
    pair.step(follow("0", 5))
    pair.land()
