"""Replacing parts of a running world under streams: nobody's request fails, every answer is whole,
and what does not work out leaves the world as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from core.errors import ConfigError
from deploy.launcher import LocalWorld
from deploy.rollout.messages import Deploy
from deploy.rollout.running import asked, control_of, seen
from tests.world.faults import alive, until
from tests.world.scripted import Answer, ask, completion, scripted_world

pytestmark = pytest.mark.world

WORDS = "".join(f"{number} keepers of lights write a log. " for number in range(6))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with scripted_world(tmp_path_factory.mktemp("rollout"), step_ms=4.0) as running:
        yield running


class Callers:
    """So many who ask one question after the other until the block ends. One in two keeps its
    connection, as a client library does; the others come anew each time."""

    def __init__(self, world: LocalWorld, count: int = 20) -> None:
        self.answers: list[tuple[str, Answer]] = []
        self.failures: list[BaseException] = []
        self._bases = list(world.edges.values())
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(count)
        ]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        base, turn = self._bases[number % len(self._bases)], 0
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as kept:
            while not self._over.is_set():
                turn += 1
                body = completion(f"{number}, {turn}: {WORDS}", max_tokens=60)
                try:
                    answer = ask(base, body, client=kept if number % 2 else None)
                except httpx.HTTPError as error:
                    self.failures.append(error)
                    return
                self.answers.append((body["prompt"], answer))

    def check(self) -> None:
        assert self.failures == []
        bad = [one for _, one in self.answers if one.error is not None or not one.done]
        assert bad == []
        assert all(prompt.startswith(answer.text) for prompt, answer in self.answers)
        assert {answer.finish for _, answer in self.answers} <= {"length", "stop"}


def deploy(world: LocalWorld, unit: str, **more: object) -> list[str]:
    what = Deploy(unit=unit, **{"again": True, "idle_s": 30.0, "ready_s": 30.0, **more})
    return list(asked(what, world.world.state))


def pids(world: LocalWorld) -> dict[str, int]:
    return {one.name: one.pid for one in seen(control_of(world.world.state))}


def test_an_edge_and_a_region_are_replaced_under_twenty_streams(world: LocalWorld) -> None:
    before = pids(world)
    with Callers(world) as callers:
        assert until(lambda: len(callers.answers) >= 10)
        deploy(world, "ams")
        deploy(world, "eu")
        seen_so_far = len(callers.answers)
        assert until(lambda: len(callers.answers) >= seen_so_far + 20)
    callers.check()
    after = pids(world)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"ams", "eu", "eu-prefill", "eu-decode"}
