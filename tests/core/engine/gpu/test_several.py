"""A model split over devices writes what it writes on one, and all ranks do the same in the same
order: steps, sums, graphs."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from core.engine.engine import Engine
from core.engine.gpu.device import HostDevice, HostMark
from core.engine.messages import (
    EXIT_PEER,
    Begin,
    Prefill,
    RankConfig,
    Ready,
    Reserve,
    Reserved,
    Run,
    SequenceSpec,
    Shutdown,
    Stepped,
)
from core.engine.plan import LoadedModel, Runner, Scores, SequenceId, StepPlan
from core.engine.runner_torch import TorchRunner
from core.errors import ConfigError, NodeLost
from core.parallel import Plan
from tests.core.engine.gpu.several import Recorder, serving, settled
from tests.core.engine.rank_process import RankProcess, rank_process
from tests.core.engine.ranks import configs
from tests.core.models.families import FAMILIES, family_folder
from tests.core.models.tiny import prompt, row

NAMES = [SequenceId(name) for name in "abcd"]
PLANS = [
    ("llama3", Plan(tp=2)),
    ("llama3", Plan(pp=3)),
    ("deepseek_v3", Plan(tp=2, pp=2)),
    ("qwen3_moe", Plan(tp=2, ep=2)),
    ("deepseek_v3", Plan(dp_attention=2, ep=2)),
]
Written = dict[str, tuple[list[int], list[Scores]]]


def spec(which: int) -> SequenceSpec:
    """Greedy, twice: one drawn, one scored; prompts of several chunks."""
    return SequenceSpec(
        token_ids=tuple(prompt(20 + 25 * which, which)),
        max_tokens=14,
        temperature=0.9 if which == 2 else 0.0,
        seed=which,
        logprobs=2 if which == 3 else None,
    )


def written(loaded: LoadedModel, runner: Runner, stages: int = 1) -> Written:
    engine = Engine(loaded, runner, max_sequences=4, max_step_tokens=48, depth=2, stages=stages)
    found: Written = {name: ([], []) for name in NAMES}
    for name in NAMES:
        engine.handle(Run(name, spec(NAMES.index(name))))
    while engine.step():
        for message in engine.messages():
            if isinstance(message, Stepped):
                for output in message.outputs:
                    found[output.sequence][0].extend(output.token_ids)
                    found[output.sequence][1].extend(output.scores)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("several")
    return {name: family_folder(root / name, FAMILIES[name]) for name, _ in PLANS}


def same(found: Written, expected: Written) -> None:
    for name, (ids, scores) in expected.items():
        assert found[name][0] == ids
        for one, other in zip(found[name][1], scores, strict=True):
            assert one.top_ids == other.top_ids
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> dict[str, Written]:
    """On one rank, a CPU."""
    found = {}
    for family, folder in folders.items():
        runner = TorchRunner(
            RankConfig(node="n", socket_fd=-1, source=str(folder), kv_blocks=64, dtype="float32")
        )
        found[family] = written(runner.load(lambda stage, fraction: None), runner)
        runner.close()
    return found


@pytest.mark.parametrize(("family", "plan"), PLANS, ids=str)
def test_ranks_on_devices_write_what_one_rank_writes(
    family: str, plan: Plan, folders: dict[str, Path], whole: dict[str, Written]
) -> None:
    """Before there are graphs, and again by them, on the same order of captures everywhere."""
    devices = [Recorder(slow_s=0.02 * rank) for rank in range(plan.ranks)]
    with serving(folders[family], plan, devices, max_sequences=4) as node:
        for leader in node.leaders:
            loaded = node.loaded[leader._config.rank]
            same(written(loaded, leader, plan.pp), whole[family])
            settled(leader)
            same(written(loaded, leader, plan.pp), whole[family])
            work = leader.work()
            assert work.sent_bytes >= work.least_bytes > 0
            assert min(work.stage_seconds) > 0
    told = [device.told for device in devices]
    assert all(one == told[0] for one in told)
    if plan.ep == 1:
        assert "capture 0" in told[0]
        assert "replay 0" in told[0]
    else:
        assert not told[0], "tokens that travel need the host"


def test_a_graph_that_one_rank_cannot_have_is_used_by_none(
    folders: dict[str, Path], whole: dict[str, Written]
) -> None:
    plan = Plan(tp=2)
    devices = [Recorder(), Recorder(refused=0)]
    with serving(folders["llama3"], plan, devices, max_sequences=4) as node:
        (leader,), loaded = node.leaders, node.loaded[0]
        same(written(loaded, leader), whole["llama3"])
        settled(leader)
        same(written(loaded, leader), whole["llama3"])
    for device in devices:
        assert "replay 0" not in device.told
        assert "replay 1" in device.told, "other sizes have graphs"


def test_blocks_that_arrive_are_taken_to_every_device(
    folders: dict[str, Path], whole: dict[str, Written]
) -> None:
    """One node of two ranks has read a prompt, another one answers it."""
    name, wanted = NAMES[1], spec(1)
    plan = Plan(tp=2)
    told = [Recorder(), Recorder()]
    with ExitStack() as stack:
        reader, writer = (
            stack.enter_context(serving(folders["llama3"], plan, told, kv_blocks=32))
            for _ in range(2)
        )
        read, write = (
            Engine(node.loaded[0], node.leaders[0], max_sequences=4, max_step_tokens=48)
            for node in (reader, writer)
        )
        read.handle(Prefill(name, wanted))
        while read.step():
            pass
        filled = read.scheduler.roster.get(name)
        assert filled is not None
        write.handle(Reserve(name, wanted))
        (reserved,) = (one for one in write.messages() if isinstance(one, Reserved))
        for rank in range(plan.ranks):
            for index, block in reserved.fill[0].items():
                there = filled.table.groups[0][index]
                writer.block(rank, 0, block)[:] = reader.block(rank, 0, there)
        write.handle(Begin(name))
        found: list[int] = []
        while write.step():
            for message in write.messages():
                if isinstance(message, Stepped):
                    found += [one for output in message.outputs for one in output.token_ids]
        assert write.scheduler.counters.computed_prompt <= 1
    assert found == whole["llama3"][name][0]


class Held(HostDevice):
    """Its steps come to their end while `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waited = threading.Event()

    def mark(self) -> HostMark:
        device = self

        class Mark(HostMark):
            def wait(self) -> None:
                if not device.gate.is_set():
                    device.waited.set()
                assert device.gate.wait(30)

        return Mark(time.perf_counter())


@pytest.mark.parametrize("late", [0, 1])
def test_a_step_has_ended_when_it_has_on_all_devices(late: int, folders: dict[str, Path]) -> None:
    """Only then may its blocks be sent: each rank's front memory has its part of them."""
    devices = [Held(), Held()]
    with serving(folders["llama3"], Plan(tp=2), devices) as node:
        devices[late].gate.clear()
        step = StepPlan(1, (row(prompt(32), 0, (1, 2), None),))
        handle = node.leaders[0].submit(step)
        assert devices[late].waited.wait(30)
        with pytest.raises(TimeoutError):
            handle.result(0.3)
        devices[late].gate.set()
        assert handle.result(30).rows[0].error is None


def test_each_rank_takes_its_card() -> None:
    config = RankConfig(node="n", socket_fd=-1, source="", kv_blocks=1, rank=5, local_rank=1)
    assert config.gpu == 1
    assert msgspec.structs.replace(config, gpus=(2, 6)).gpu == 6
    with pytest.raises(ConfigError, match=r"rank 5 is number 2 of its host.* given 1 CUDA"):
        _ = msgspec.structs.replace(config, gpus=(2,)).gpu


def test_a_rank_that_goes_ends_every_step(folders: dict[str, Path]) -> None:
    devices = [Recorder(), Recorder()]
    with serving(folders["llama3"], Plan(tp=2), devices) as node:
        (leader,) = node.leaders
        for peer in leader._rank.company.peers.values():  # as the end of its process would
            peer.close()
        step = StepPlan(1, (row([5], 0, (1,)),))
        for _ in range(2):
            with pytest.raises(NodeLost, match="gone"):
                leader.submit(step).result(30)
        with pytest.raises(NodeLost, match="gone"):
            leader.work()


def test_rank_processes_capture_in_one_order_whatever_their_pace(
    folders: dict[str, Path], whole: dict[str, Written]
) -> None:
    """The second is slower, so that it is idle at other times."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(rank_process(config, "tests.core.engine.gpu.several"))
            for config in configs(folders["llama3"], Plan(tp=2), depth=2, max_sequences=4)
        ]
        leader = ranks[0]
        for rank in ranks:
            rank.until(Ready)
        captured: list[list[str]] = []
        for turn in range(2):
            names = [SequenceId(f"{turn}{name}") for name in NAMES]
            leader.say(*(Run(name, spec(which)) for which, name in enumerate(names)))
            for name, own in zip(names, NAMES, strict=True):
                assert leader.until_finished(name) == whole["llama3"][own][0]
            if turn == 0:
                captured = [noted(rank, 2) for rank in ranks]
        leader.say(Shutdown())
        assert [rank.exit_code() for rank in ranks] == [0, EXIT_PEER]
    assert captured[0] == captured[1]


def noted(rank: RankProcess, count: int) -> list[str]:
    """The first lines that it says on stderr."""
    stderr = rank.process.stderr
    assert stderr is not None
    return [stderr.readline().decode() for _ in range(count)]
