"""The ranks of a plan as processes: what they write together, and how they end together."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from core.engine.engine import Engine
from core.engine.messages import (
    EXIT_PEER,
    RankConfig,
    Ready,
    Run,
    SequenceSpec,
    Shutdown,
    Stepped,
)
from core.engine.plan import SequenceId
from core.engine.runner_torch import TorchRunner
from core.parallel import Plan
from tests.core.engine.rank_process import RankProcess, complaint, rank_process
from tests.core.engine.ranks import configs
from tests.core.models.families import FAMILIES, family_folder
from tests.core.models.tiny import prompt

GONE_S = 20.0
NAMES = [SequenceId(name) for name in "abc"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder(tmp_path_factory.mktemp("model"), FAMILIES["llama3"])


def spec(which: int) -> SequenceSpec:
    """Greedy, and two that are drawn."""
    return SequenceSpec(
        token_ids=tuple(prompt(20 + 15 * which, which)),
        max_tokens=24,
        temperature=0.9 * (which > 0),
        seed=which,
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What one rank writes."""
    runner = TorchRunner(
        RankConfig(node="n", socket_fd=-1, source=str(folder), kv_blocks=64, dtype="float32")
    )
    engine = Engine(
        runner.load(lambda stage, fraction: None), runner, max_sequences=4, max_step_tokens=64
    )
    texts: dict[str, list[int]] = {name: [] for name in NAMES}
    for which, name in enumerate(NAMES):
        engine.handle(Run(name, spec(which)))
    while engine.step():
        for message in engine.messages():
            if isinstance(message, Stepped):
                for output in message.outputs:
                    texts[output.sequence] += output.token_ids
    runner.close()
    return [texts[name] for name in NAMES]


@contextmanager
def started(folder: Path, plan: Plan, **changes: object) -> Iterator[list[RankProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(rank_process(config))
            for config in configs(folder, plan, pulse_s=0.2, max_step_tokens=64, **changes)
        ]


def ended(ranks: list[RankProcess]) -> list[int]:
    """Their exit codes, which come soon after the first."""
    began = time.monotonic()
    codes = [rank.exit_code() for rank in ranks]
    assert time.monotonic() - began < GONE_S
    return codes


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(pp=2)], ids=str)
def test_ranks_write_what_one_writes_and_end_with_the_first_that_dies(
    plan: Plan, folder: Path, expected: list[list[int]]
) -> None:
    with started(folder, plan) as ranks:
        leader, follower = ranks
        ready = leader.until(Ready)
        other = follower.until(Ready)
        assert isinstance(ready, Ready)
        assert isinstance(other, Ready)
        assert ready.fingerprint == other.fingerprint
        assert ready.decode_tokens_per_s > 0
        leader.say(*(Run(name, spec(which)) for which, name in enumerate(NAMES)))
        assert [leader.until_finished(name) for name in NAMES] == expected
        stats = [one.stats for one in leader.heard if isinstance(one, Stepped)][-1]
        assert len(stats.stage_seconds) == plan.pp
        assert 0 < stats.least_bytes <= stats.sent_bytes
        leader.say(Run(SequenceId("d"), spec(1)))
        while not leader.tokens("d")[0]:
            assert leader.listen()
        follower.process.send_signal(signal.SIGKILL)
        assert ended(ranks) == [EXIT_PEER, -signal.SIGKILL]
        assert not complaint(leader), "the front says it, once"


def test_ranks_leave_with_their_leader(folder: Path) -> None:
    with started(folder, Plan(tp=2)) as ranks:
        for rank in ranks:
            rank.until(Ready)
        ranks[0].say(Shutdown())
        assert ended(ranks) == [0, EXIT_PEER]
