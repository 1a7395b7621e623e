"""How many nodes of a model may run, as a topology says it."""

from __future__ import annotations

import re

import pytest

from core.config import parse
from core.config_scale import Scale, at_first, first_nodes
from core.errors import ConfigError
from deploy import toml_write

HEAD = """
version = 1
[models.big]
source = "/models/big"
[models.small]
source = "/models/small"
[[edges]]
name = "ams"
[[regions]]
name = "eu"
"""
NODES = "".join(
    f'[[regions.nodes]]\nname = "{name}"\nrole = "{role}"\nmodel = "{model}"\n'
    for name, role, model in (
        ("p1", "prefill", "big"), ("d1", "decode", "big"), ("d2", "decode", "big"),
        ("d3", "decode", "big"), ("c1", "combined", "small"), ("c2", "combined", "small"),
    )
)  # fmt: skip
SCALE = "[regions.scale.big]\nleast = 0\nidle_s = 60\n"
GOOD = HEAD + NODES + SCALE


def test_a_good_one_is_read_and_written_back() -> None:
    topology = parse(GOOD)
    assert topology.regions[0].scale == {"big": Scale(least=0, idle_s=60.0)}
    assert parse(toml_write.dump(topology)) == topology


def test_without_it_every_node_runs_always() -> None:
    (region,) = parse(HEAD + NODES).regions
    assert at_first(region) == {}
    assert list(first_nodes(region, at_first(region))) == list(region.nodes)


def test_of_each_role_the_first_ones_run() -> None:
    (region,) = parse(GOOD.replace("least = 0", "least = 1")).regions
    assert at_first(region) == {("big", "prefill"): 1, ("big", "decode"): 1}
    assert [n.name for n in first_nodes(region, at_first(region))] == ["p1", "d1", "c1", "c2"]
    wanted = {("big", "prefill"): 0, ("big", "decode"): 2}
    assert [n.name for n in first_nodes(region, wanted)] == ["d1", "d2", "c1", "c2"]
    resting = {n.name for n in first_nodes(region, wanted, {"d1", "c1"})}
    assert resting == {"d2", "d3", "c1", "c2"}, "what is not scaled runs, whether it rests or not"


MISTAKES = [
    ("least = 0", "most = 4", "most is 4, but region 'eu' has 3 nodes of a role"),
    ("least = 0", "least = 3\nmost = 2", "least is 3, more than the 2 that may run"),
    ("least = 0", "least = 4", "least is 4, more than the 3 that may run"),
    ("scale.big", "scale.tiny", "region 'eu' has no node that serves 'tiny'"),
    ("least = 0", "least = -1", "least"),
    ("least = 0", "most = 0", "most"),
    ("idle_s = 60", "idle = 60", "idle_s"),
    ("idle_s = 60", "queue_s = 0", "queue_s"),
]


@pytest.mark.parametrize(("old", "new", "complaint"), MISTAKES)
def test_mistakes_are_named_with_their_line(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        parse(GOOD.replace(old, new), name="world.toml")
    place = re.match(r"world\.toml:(\d+): ", str(refused.value))
    assert place is not None
    first = GOOD.index(SCALE)
    assert int(place[1]) > GOOD[:first].count("\n")
