"""On a GPU (with TRITON_INTERPRET=0): streams, pinned memory, graphs, NCCL. The CPU says what is
so. Tests of several ranks need a card for each."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from core.engine.engine import Engine
from core.engine.gpu.runner import DeviceRunner
from core.engine.mesh import Mesh
from core.engine.messages import RankConfig, Ready, Run, SequenceSpec, Shutdown, Stepped
from core.engine.plan import Row, RowResult, SequenceId, StepPlan
from core.engine.process_groups import TorchGroup, Traffic, gloo
from core.engine.runner_torch import TorchRunner
from core.parallel import Plan
from tests.core.engine.rank_process import rank_process
from tests.core.engine.ranks import configs
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


def test_a_graph_keeps_the_sums_of_ranks() -> None:
    """NCCL's calls, in a group of one: they can be captured, and reach what is on the device."""
    from core.engine.gpu.cuda import CudaDevice
    from core.engine.gpu.groups import DeviceGroup, nccl

    device = CudaDevice()
    host = TorchGroup(gloo(HashStore(), 0, 1, "127.0.0.1"), Mesh(0, {}), Traffic())
    group = DeviceGroup(nccl(HashStore(), 0, [0], device.where), host)
    x, total = (torch.zeros(8, device=device.where) for _ in range(2))

    def step() -> None:
        total.copy_(group.gather(group.sum(x + 1)).sum(0))

    step()
    replay = device.capture(step)
    x.fill_(41)
    replay()
    device.mark().wait()
    assert total.tolist() == [42.0] * 8
    rows = torch.arange(6.0, device=device.where).view(3, 2)
    carried, counts = group.exchange(rows, [3])
    device.mark().wait()
    assert carried.tolist() == rows.tolist()
    assert counts == (3,)
    host.close()


def written(folder: Path, specs: dict[SequenceId, SequenceSpec]) -> Iterator[list[int]]:
    """What one rank on a CPU writes, in the order of `specs`."""
    runner = TorchRunner(
        RankConfig(node="n", socket_fd=-1, source=str(folder), kv_blocks=64, dtype="float32")
    )
    engine = Engine(
        runner.load(lambda stage, fraction: None), runner, max_sequences=4, max_step_tokens=64
    )
    texts: dict[SequenceId, list[int]] = {name: [] for name in specs}
    for name, spec in specs.items():
        engine.handle(Run(name, spec))
    while engine.step():
        for message in engine.messages():
            if isinstance(message, Stepped):
                for output in message.outputs:
                    texts[output.sequence] += output.token_ids
    runner.close()
    yield from texts.values()


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama3", Plan(tp=2)),
        ("llama3", Plan(pp=2)),
        ("deepseek_v3", Plan(tp=2, pp=2)),
        ("qwen3_moe", Plan(tp=2, ep=2)),
    ],
    ids=str,
)
def test_ranks_on_cards_of_their_own_write_what_one_writes(
    family: str, plan: Plan, tmp_path: Path
) -> None:
    if torch.cuda.device_count() < plan.ranks:
        pytest.skip(f"needs {plan.ranks} CUDA devices")
    folder = family_folder(tmp_path, FAMILIES[family])
    specs = {
        SequenceId(f"{turn}{which}"): SequenceSpec(
            token_ids=tuple(prompt(20 + 15 * which, which)),
            max_tokens=24,
            temperature=0.9 * (which == 2),
            seed=which,
        )
        for turn in range(2)
        for which in range(3)
    }
    expected = list(written(folder, specs))
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(rank_process(config))
            for config in configs(folder, plan, device="cuda", depth=2, max_step_tokens=64)
        ]
        for rank in ranks:
            rank.sock.settimeout(300)  # kernels compile, once on a machine
            rank.until(Ready)
        found = []
        for turn in range(2):
            names = [name for name in specs if name.startswith(str(turn))]
            ranks[0].say(*(Run(name, specs[name]) for name in names))
            found += [ranks[0].until_finished(name) for name in names]
            time.sleep(1)  # idle: graphs are captured, for the second turn
        ranks[0].say(Shutdown())
        assert ranks[0].exit_code() == 0
    assert found == expected
