"""On a GPU (with TRITON_INTERPRET=0): streams, pinned memory, graphs. The CPU says what is so."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch

from core.engine.gpu.runner import DeviceRunner
from core.engine.messages import RankConfig
from core.engine.plan import Row, RowResult, SequenceId, StepPlan
from core.engine.runner_torch import TorchRunner
from tests.core.models.families import FAMILIES, family_folder
from tests.core.models.tiny import GREEDY, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "0",
        reason="needs a CUDA device, and kernels that are compiled for it",
    ),
]
STEPS = 40


def gpu(config: RankConfig) -> DeviceRunner:
    from core.engine.gpu.wiring import gpu_runner

    return gpu_runner(config)


def answers(runner: DeviceRunner | TorchRunner) -> list[tuple[RowResult, ...]]:
    """Two prompts, the longer in chunks, then decode steps that follow each other; first in a
    hurry, then with gaps in which graphs are captured."""
    ids, other = prompt(70), prompt(20, 4)
    table, second = tuple(range(8)), tuple(range(8, 16))

    def row(name: str, own: list[int], start: int, blocks: tuple[int, ...], last: bool) -> Row:
        return Row(SequenceId(name), tuple(own), start, (blocks,), GREEDY if last else None)

    plans = [
        StepPlan(0, (row("a", ids[:50], 0, table, False), row("b", other, 0, second, True))),
        StepPlan(1, (row("a", ids[50:], 50, table, True),)),
    ]
    for step in range(STEPS):
        rows = [
            Row(SequenceId(name), (0,), start + step, (blocks,), GREEDY, follows=True)
            for name, start, blocks in (("a", 70, table), ("b", 20, second))
        ]
        plans.append(StepPlan(2 + step, tuple(rows)))
    runner.load(lambda stage, fraction: None)
    found = []
    for first in range(0, len(plans), 6):
        handles = [runner.submit(plan) for plan in plans[first : first + 6]]
        found += [handle.result(60).rows for handle in handles]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gives_what_the_cpu_gives(family: str, tmp_path: Path) -> None:
    source = str(family_folder(tmp_path, FAMILIES[family]))
    config = RankConfig(node="n", socket_fd=-1, source=source, kv_blocks=64, dtype="float32")
    found = []
    ahead = gpu(msgspec.structs.replace(config, device="cuda"))
    for runner in (ahead, TorchRunner(config, native=False)):
        try:
            found.append(answers(runner))
        finally:
            runner.close()
    assert found[0] == found[1]
