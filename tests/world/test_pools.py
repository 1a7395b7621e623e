"""Two models that share one place: real processes, scripted ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from core import config
from core.config_scale import Scale
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from deploy.scaling import LATE_S
from tests.tiny_text import write_tiny_folder
from tests.world.faults import until
from tests.world.scripted import (
    CONTEXT,
    MODEL,
    Answer,
    ask,
    completion,
    lines_of,
    region_status,
    streaming,
    take,
    topology,
)  # fmt: skip

OTHER = "other"
NODE = {MODEL: "one", OTHER: "two"}
IDLE_S, TURN_S = 8.0, 0.5
"""The first is enough to look who is there, on a machine that is busy."""
LONG = 4000
"""Tokens of an answer that goes on for many turns."""
PLENTY_S = 60.0


@dataclass(frozen=True, slots=True)
class Shared:
    world: LocalWorld
    said: list[str]

    @property
    def edge(self) -> str:
        return self.world.edges["here"]

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in region_status(self.world, "home")["nodes"]}

    @property
    def alive(self) -> list[str]:
        return [name for name, node in self.nodes().items() if node["alive"]]

    def ask(self, model: str, words: str = "hello", tokens: int = 5) -> Answer:
        return ask(self.edge, completion(words, model=model, max_tokens=tokens))

    def most_at_once(self) -> int:
        """Of processes between their start and their end, by what was said."""
        there = most = 0
        for line in tuple(self.said):
            there += (" starts (" in line) - line.endswith(" is off")
            most = max(most, there)
        return most


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    source = write_tiny_folder(folder / "tiny", context=CONTEXT)
    plain = topology(source, step_ms=1.0, prefill_tokens_per_s=4000.0)
    pace = config.Scripted(step_ms=1.0, prefill_tokens_per_s=4000.0, repeat=True)
    tiny = msgspec.structs.replace(plain.models[MODEL], aliases=(), scripted=pace)
    nodes = tuple(
        config.Node(
            name=name, role=Role.COMBINED, model=model, kv_tokens=CONTEXT, speculate=False,
            pool="gpu",
        )
        for model, name in NODE.items()
    )  # fmt: skip
    described = msgspec.structs.replace(
        plain,
        models={MODEL: tiny, OTHER: tiny},
        edges=(config.Edge(name="here", listen="127.0.0.1:0"),),
        regions=(
            config.Region(
                name="home",
                nodes=nodes,
                pools={"gpu": config.Pool(places=1, turn_s=TURN_S)},
                scale={model: Scale(least=0, idle_s=IDLE_S) for model in NODE},
            ),
        ),
    )
    file = folder / "shared.toml"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as world:
        yield Shared(world, said)


def test_whoever_is_asked_for_has_the_place(shared: Shared) -> None:
    assert shared.alive == []
    assert {node["pool"] for node in shared.nodes().values()} == {"gpu"}
    first = shared.ask(MODEL)
    assert (first.status, first.done, first.error) == (200, True, None)
    assert shared.alive == ["one"]
    other = shared.ask(OTHER)
    assert (other.status, other.done, other.text) == (200, True, first.text)
    assert shared.alive == ["two"]
    assert shared.nodes()["one"]["off"], "it is off, and not lost"
    assert "one gives its place to other" in shared.said
    assert shared.most_at_once() == 1


def test_a_swap_waits_for_the_stream_and_breaks_nothing(shared: Shared) -> None:
    assert shared.ask(MODEL).done
    with ThreadPoolExecutor(1) as pool, streaming(
        shared.edge, completion("a long one", max_tokens=LONG)
    ) as response:  # fmt: skip
        lines = lines_of(response)
        answer = Answer(response.status_code, response.headers)
        while not take(answer, next(lines)):
            pass
        asked = time.monotonic()
        waits = pool.submit(shared.ask, OTHER)
        for line in lines:
            take(answer, line)
        ended = time.monotonic()
        assert not waits.done(), "there is one place"
        came = waits.result(PLENTY_S)
        spent_s = time.monotonic() - ended
    assert (answer.done, answer.error) == (True, None)
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == LONG
    assert (came.status, came.done, came.error) == (200, True, None)
    assert ended - asked > TURN_S, "the turn was over before the stream"
    assert spent_s < LATE_S, "and its place was not taken by force"
    assert shared.most_at_once() == 1


def test_both_at_once_all_get_their_answers(shared: Shared) -> None:
    with ThreadPoolExecutor(8) as pool:
        models = [MODEL, OTHER] * 4
        answers = list(pool.map(lambda model: shared.ask(model, f"for {model}", 400), models))
    assert [(one.status, one.done, one.error) for one in answers] == [(200, True, None)] * 8
    assert shared.most_at_once() == 1


def test_a_killed_one_comes_back_and_an_idle_one_goes(shared: Shared) -> None:
    assert shared.ask(MODEL).done
    shared.world.kill("one")
    again = shared.ask(MODEL)
    assert (again.status, again.done, again.error) == (200, True, None)
    assert until(lambda: shared.alive == [] and shared.said[-1] == "one is off", PLENTY_S)
    assert set(shared.world.processes) == {"here", "home"}
    assert {node["off"] for node in shared.nodes().values()} == {True}
    assert shared.most_at_once() == 1
