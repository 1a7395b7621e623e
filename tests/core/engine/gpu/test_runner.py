"""The runner of a GPU as the rank sees it, on a device that is the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.engine.gpu.device import HostDevice
from core.engine.gpu.rank import Kit
from core.engine.gpu.runner import DeviceRunner
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, Row, SequenceId, StepPlan
from core.engine.runner_torch import TorchRunner
from core.errors import ConfigError
from core.kv.memory import attach
from core.models.config import ModelConfig
from tests.core.engine.gpu.ahead import AheadOps
from tests.core.models.families import FAMILIES, family_folder
from tests.core.models.tiny import GREEDY, prompt, row

WAIT_S = 30.0


class Watched(HostDevice):
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.captured = threading.Semaphore(0)
        self.pinned_bytes = 0
        self.fails = False

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned_bytes += memory.nbytes

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        assert threading.get_ident() == self.thread
        if self.fails:
            raise ValueError("the driver is gone")
        self.captured.release()
        return super().capture(run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("model"), FAMILIES["llama3"])


class Machine:
    def __init__(self, folder: Path, **changes: object) -> None:
        self.devices: list[Watched] = []
        self.rehearsed: list[tuple[str, torch.dtype]] = []
        fields = {"node": "n", "socket_fd": -1, "kv_blocks": 64, "dtype": "float32"}
        self.config = RankConfig(**fields | {"source": str(folder)} | changes)  # type: ignore[arg-type]  # fields of every type
        self.runner = DeviceRunner(
            self.config,
            Kit(
                device=self._device,
                rehearse=self._rehearse,
                ops=lambda where, dtype: AheadOps(dtype),
            ),
        )

    def load(self) -> LoadedModel:
        return self.runner.load(lambda stage, fraction: None)

    @property
    def device(self) -> Watched:
        return self.devices[0]

    def _device(self) -> Watched:
        self.devices.append(Watched())
        return self.device

    def _rehearse(self, model: ModelConfig, dtype: torch.dtype, where: torch.device) -> None:
        self.rehearsed.append((model.family, dtype))


@pytest.fixture
def machine(folder: Path) -> Iterator[Machine]:
    found = Machine(folder)
    yield found
    found.runner.close()


def test_load_says_what_it_found(machine: Machine) -> None:
    stages: list[str] = []
    model = machine.runner.load(lambda stage, fraction: stages.append(f"{stage} {fraction:.0%}"))
    assert os.fstat(model.memory_fd).st_size == model.geometry.pool_bytes
    assert machine.device.pinned_bytes == model.geometry.pool_bytes
    assert machine.rehearsed == [("llama", torch.float32)]
    assert model.prefill_tokens_per_s > 1
    assert [stage.split()[0] for stage in stages if stage.endswith("100%")] == [
        "weights", "kernels", "measuring"
    ]  # fmt: skip


def test_the_same_answer_as_the_runner_of_a_cpu(machine: Machine, folder: Path) -> None:
    """Steps are submitted before those that they follow have an answer."""
    own = machine.load()
    cpu = TorchRunner(machine.config, native=False)
    other = cpu.load(lambda stage, fraction: None)
    assert other.fingerprint == own.fingerprint
    assert other.geometry == own.geometry
    ids = prompt(20)

    def plans() -> Iterator[StepPlan]:
        yield StepPlan(0, (row(ids, 0, range(3)),))
        for step in range(6):
            followed = Row(SequenceId("s"), (0,), 20 + step, ((0, 1),), GREEDY, follows=True)
            yield StepPlan(1 + step, (replace(followed, sample=replace(GREEDY, seed=step)),))

    found = []
    for runner in (machine.runner, cpu):
        handles = [runner.submit(plan) for plan in plans()]
        found.append([handle.result(WAIT_S).rows for handle in handles])
    cpu.close()
    assert found[0] == found[1]
    assert len({one[0].token_ids for one in found[0]}) > 2


def test_graphs_are_captured_when_nothing_is_to_be_done(machine: Machine) -> None:
    machine.load()
    steps = [row([1], start, range(2)) for start in range(3)]
    for number, one in enumerate(steps):
        machine.runner.submit(StepPlan(number, (one,))).result(WAIT_S)
    assert machine.device.captured.acquire(timeout=WAIT_S)
    last = machine.runner.submit(StepPlan(9, (row([1], 3, range(2)),)))
    assert last.result(WAIT_S).rows[0].token_ids


def test_what_arrives_is_there_for_the_next_step(machine: Machine, folder: Path) -> None:
    ids = prompt(33)
    sender = Machine(folder)
    told = sender.load()
    own = machine.load()
    sender.runner.submit(StepPlan(0, (row(ids[:32], 0, (5, 9), None),))).result(WAIT_S)
    expected = sender.runner.submit(StepPlan(1, (row(ids[32:], 32, (5, 9, 1)),))).result(WAIT_S)
    source = attach(told.memory_fd, told.geometry.pool_bytes)
    target = attach(own.memory_fd, own.geometry.pool_bytes)
    for there, here in ((5, 40), (9, 3)):
        start, end = told.geometry.block_span(0, there)
        at, to = own.geometry.block_span(0, here)
        target[at:to] = source[start:end]
    source.close()
    target.close()
    sender.runner.close()
    machine.runner.arrive(((40, 3),))
    found = machine.runner.submit(StepPlan(0, (row(ids[32:], 32, (40, 3, 7)),))).result(WAIT_S)
    assert found.rows == expected.rows


def test_a_device_that_fails_outside_a_step_fails_the_next(machine: Machine) -> None:
    machine.load()
    machine.device.fails = True
    for number in range(3):
        machine.runner.submit(StepPlan(number, (row([1], number, range(2)),))).result(WAIT_S)
    waiting = threading.Event()
    machine.runner._giving.submit(waiting.set)  # behind the capture that fails
    assert waiting.wait(WAIT_S)
    handle = machine.runner.submit(StepPlan(4, (row([1], 3, range(2)),)))
    with pytest.raises(ValueError, match="the driver is gone"):
        handle.result(WAIT_S)


def test_what_cannot_be_is_refused(folder: Path) -> None:
    for changes, complaint in (({"dtype": "int3"}, "'int3'"), ({"context": 600}, "600 is above")):
        machine = Machine(folder, **changes)
        with pytest.raises(ConfigError, match=complaint):
            machine.load()
        machine.runner.close()
    with pytest.raises(RuntimeError, match="before load"):
        Machine(folder).runner.submit(StepPlan(0, ()))


def test_a_machine_without_a_gpu_says_so() -> None:
    from core.engine.gpu.cuda import CudaDevice

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaDevice()
