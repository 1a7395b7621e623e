"""Two engines, each on its own device, hand a prompt over as fronts do: through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.engine.engine import Engine
from core.engine.gpu.device import HostDevice
from core.engine.gpu.rank import Kit
from core.engine.gpu.runner import DeviceRunner
from core.engine.messages import (
    Begin,
    Prefill,
    RankConfig,
    Reserve,
    Reserved,
    Run,
    SequenceSpec,
    Stepped,
)
from core.engine.plan import LoadedModel, SequenceId
from core.kv.memory import attach
from tests.core.engine.gpu.ahead import AheadOps
from tests.core.models.families import VARIANTS, family_folder
from tests.core.models.tiny import prompt

WINDOW = "qwen3, biases, tied, window"
NAME = SequenceId("a")


@contextmanager
def machine(folder: Path) -> Iterator[tuple[Engine, LoadedModel]]:
    config = RankConfig(node="n", socket_fd=-1, source=str(folder), kv_blocks=32, dtype="float32")
    runner = DeviceRunner(
        config,
        Kit(
            device=HostDevice,
            rehearse=lambda model, dtype, where: None,
            ops=lambda where, dtype: AheadOps(dtype),
        ),
    )
    try:
        loaded = runner.load(lambda stage, fraction: None)
        yield Engine(loaded, runner, max_sequences=4, max_step_tokens=64, depth=2), loaded
    finally:
        runner.close()


def tokens(engine: Engine) -> list[int]:
    """Of the one sequence, to its end."""
    found: list[int] = []
    for _ in range(100):
        engine.step()
        for message in engine.messages():
            if isinstance(message, Stepped):
                for output in message.outputs:
                    found += output.token_ids
                    if output.finish is not None:
                        return found
    raise AssertionError("it never ended")


@pytest.mark.parametrize("name", ["deepseek_v3", WINDOW])
def test_a_prompt_read_on_one_device_is_answered_on_another(name: str, tmp_path: Path) -> None:
    folder = family_folder(tmp_path, VARIANTS[name])
    spec = SequenceSpec(token_ids=tuple(prompt(90)), max_tokens=8, temperature=0)
    with machine(folder) as (reader, read), machine(folder) as (writer, own):
        reader.handle(Run(NAME, spec))
        expected = tokens(reader)
        assert len(expected) == 8

        source = SequenceId("b")
        reader.handle(Prefill(source, spec))
        while reader.step():
            pass
        filled = reader.scheduler.roster.get(source)
        assert filled is not None
        writer.handle(Reserve(NAME, spec))
        reserved = next(one for one in writer.messages() if isinstance(one, Reserved))
        assert reserved.cached_tokens == 0
        there = attach(read.memory_fd, read.geometry.pool_bytes)
        here = attach(own.memory_fd, own.geometry.pool_bytes)
        for group, blocks in enumerate(reserved.fill):
            for index, block in blocks.items():
                start, end = read.geometry.block_span(group, filled.table.groups[group][index])
                at, to = own.geometry.block_span(group, block)
                here[at:to] = there[start:end]
        there.close()
        here.close()
        writer.handle(Begin(NAME))
        assert tokens(writer) == expected
        assert writer.scheduler.counters.computed_prompt <= 1


def test_without_its_kv_the_answer_is_another(tmp_path: Path) -> None:
    """What the test above would miss if devices read nothing of what arrives."""
    folder = family_folder(tmp_path, VARIANTS["deepseek_v3"])
    spec = SequenceSpec(token_ids=tuple(prompt(90)), max_tokens=8, temperature=0)
    with machine(folder) as (engine, _):
        engine.handle(Run(NAME, spec))
        expected = tokens(engine)
    with machine(folder) as (engine, _):
        engine.handle(Reserve(NAME, spec))
        engine.handle(Begin(NAME))
        assert tokens(engine) != expected
