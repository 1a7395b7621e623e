"""Draining and weighing parts of a running world by the commands; nobody's request fails for it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from core.errors import ConfigError
from deploy.launcher import LocalWorld
from deploy.orders import drain, weigh
from tests.world.callers import Callers
from tests.world.faults import until
from tests.world.scripted import ask, completion, region_status
from tests.world.test_edge_faults import key_of

pytestmark = pytest.mark.world

LONG = "".join(f"{number} keepers of lights write a log. " for number in range(20))


@pytest.fixture
def said(world: LocalWorld) -> Iterator[list[str]]:
    """What the commands say; afterwards everything works again."""
    lines: list[str] = []
    yield lines
    for name in ("eu", "eu-decode", "eu-prefill", "ams"):
        drain(world.world, name, resting=False, say=lines.append, wait_s=0)
    weigh(world.world, "eu", 0, say=lines.append)
    assert until(lambda: _draining(world, "ams", "eu") is False)


def _draining(world: LocalWorld, edge: str, region: str) -> bool:
    page = httpx.get(f"{world.edges[edge]}/status", timeout=5, trust_env=False).json()
    (found,) = [one for one in page["regions"] if one["name"] == region]
    return bool(found["draining"])


def _asked(world: LocalWorld, prompt: str) -> str:
    answer = ask(world.edges["ams"], completion(prompt, max_tokens=4))
    assert answer.status == 200
    assert answer.done
    return answer.headers["x-skerry-region"]


def test_a_region_drains_under_streams_and_comes_back(world: LocalWorld, said: list[str]) -> None:
    with Callers(world, 8, tokens=400) as callers:
        assert until(lambda: region_status(world, "eu").get("active", 0) > 0)
        drain(world.world, "eu", resting=True, say=said.append, wait_s=30)
        assert said[-1] == "  region eu is idle"
        assert until(lambda: _draining(world, "ams", "eu"))
        assert {_asked(world, f"short {number}") for number in range(3)} == {"us"}
        seen = len(callers.answers)
        assert until(lambda: len(callers.answers) >= seen + 8)
    callers.check()
    drain(world.world, "eu", resting=False, say=said.append, wait_s=0)
    assert until(lambda: _asked(world, "short again") == "eu")


def test_a_node_drains_and_the_others_take_its_part(world: LocalWorld, said: list[str]) -> None:
    home = key_of(world.edges["ams"], "eu")
    drain(world.world, "eu-prefill", resting=True, say=said.append, wait_s=30)
    (node,) = [n for n in region_status(world, "eu")["nodes"] if n["name"] == "eu-prefill"]
    assert node["draining"]
    answer = ask(
        world.edges["ams"],
        completion(f"without a reader: {LONG}", max_tokens=4, prompt_cache_key=home),
    )
    assert (answer.done, answer.headers["x-skerry-region"]) == (True, "eu")
    assert "x-skerry-prefill" not in answer.headers


def test_an_edge_drains(world: LocalWorld, said: list[str]) -> None:
    drain(world.world, "ams", resting=True, say=said.append, wait_s=30)
    ready = httpx.get(f"{world.edges['ams']}/readyz", trust_env=False)
    assert (ready.status_code, "this edge takes nothing new" in ready.text) == (503, True)
    refused = ask(world.edges["ams"], completion("x"))
    assert refused.status == 503
    assert refused.headers["retry-after"] == "5"
    assert ask(world.edges["nyc"], completion("x")).done
    drain(world.world, "ams", resting=False, say=said.append, wait_s=0)
    assert ask(world.edges["ams"], completion("x")).done


def test_a_weight_moves_prompts(world: LocalWorld, said: list[str]) -> None:
    weigh(world.world, "eu", 1, say=said.append)
    assert "weight 1" in said[-1]
    page = region_status(world, "eu")
    assert page["more"]["weight"] == 1
    with pytest.raises(ConfigError, match="only regions have a weight"):
        weigh(world.world, "ams", 1, say=said.append)


def test_a_name_that_is_none_has_the_nearest(world: LocalWorld) -> None:
    with pytest.raises(ConfigError, match=r"nothing is named 'eu-decod'; did you mean 'eu-decode'"):
        drain(world.world, "eu-decod", resting=True, say=print, wait_s=0)
