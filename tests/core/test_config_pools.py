"""Places that nodes share, as a topology says it, and what is wrong with them."""

from __future__ import annotations

import re

import pytest

from core.config import Pool, parse
from core.errors import ConfigError
from deploy import toml_write

HEAD = """
version = 1
[models.one]
source = "/models/one"
[models.two]
source = "/models/two"
[[edges]]
name = "ams"
[[regions]]
name = "eu"
"""
POOLS = """
[regions.pools.gpu]
places = 1
turn_s = 5
[regions.scale.one]
least = 0
[regions.scale.two]
least = 0
"""


def nodes(*described: tuple[str, str, str, str]) -> str:
    """(name, role, model, more)."""
    return "".join(
        f'[[regions.nodes]]\nname = "{name}"\nrole = "{role}"\nmodel = "{model}"\n{more}\n'
        for name, role, model, more in described
    )


IN_GPU = 'pool = "gpu"'
ON_0 = 'device = "cuda"\ngpus = [0]\n'
TWO = nodes(("a", "combined", "one", IN_GPU), ("b", "combined", "two", IN_GPU))
GOOD = HEAD + POOLS + TWO


def test_a_good_one_is_read_and_written_back() -> None:
    topology = parse(GOOD)
    assert topology.regions[0].pools == {"gpu": Pool(places=1, turn_s=5.0)}
    assert [node.pool for node in topology.regions[0].nodes] == ["gpu", "gpu"]
    assert parse(toml_write.dump(topology)) == topology


PAIR = nodes(
    ("p", "prefill", "one", IN_GPU), ("d", "decode", "one", IN_GPU),
    ("b", "combined", "two", IN_GPU),
)  # fmt: skip
MISTAKES = [
    (HEAD + POOLS + TWO.replace('pool = "gpu"', 'pool = "gpo"', 1),
     "node 'a' is in pool 'gpo', which region 'eu' does not have (did you mean 'gpu'?)",
     'pool = "gpo"'),
    (HEAD + POOLS.replace("[regions.scale.two]\nleast = 0\n", "") + TWO,
     "node 'b' is in pool 'gpu', but nothing says how many nodes of its model run; add "
     "[regions.scale.two] with least = 0", 'name = "b"'),
    (HEAD + "[regions.pools.gpu]\n" + nodes(("a", "combined", "one", "")),
     "pool 'gpu' of region 'eu' has no node", "[regions.pools.gpu]"),
    (HEAD + POOLS.replace("least = 0", "least = 1") + TWO,
     "2 nodes of pool 'gpu' run always, by their models' `least`, and it has room for 1: a, b",
     "[regions.pools.gpu]"),
    (HEAD + POOLS.replace("one]\nleast = 0", "one]\nleast = 1") + TWO,
     "pool 'gpu' never has a place for 'two': a always run there", "[regions.pools.gpu]"),
    (HEAD + POOLS + PAIR, "pool 'gpu' has prefill and decode nodes of 'one'",
     "[regions.pools.gpu]"),
    (HEAD + POOLS.replace("places = 1", "places = 0") + TWO, "places", "places = 0"),
    (HEAD + POOLS.replace("turn_s = 5", "turn = 5") + TWO, "turn_s", "turn = 5"),
    (HEAD + nodes(("a", "combined", "one", ON_0), ("b", "combined", "two", ON_0)),
     "nodes 'a' and 'b' both name CUDA device 0 of one machine; put them into one pool with "
     "places = 1", 'name = "b"'),
    (HEAD + POOLS.replace("places = 1", "places = 2")
     + nodes(("a", "combined", "one", ON_0 + IN_GPU), ("b", "combined", "two", ON_0 + IN_GPU)),
     "pool 'gpu' lets several nodes run", 'name = "b"'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "complaint", "where"), MISTAKES)
def test_mistakes_are_named_with_their_line(text: str, complaint: str, where: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        parse(text, name="world.toml")
    place = re.match(r"world\.toml:(\d+): ", str(refused.value))
    assert place is not None
    first = text[: text.index(where)].count("\n") + 1
    assert first <= int(place[1]) <= first + 5


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("places = 1", "places = 8"),
        HEAD + POOLS.replace("places = 1", "places = 2") + PAIR,
        HEAD + POOLS.replace("places = 1", "places = 2").replace("one]\nleast = 0", "one]") + TWO,
        HEAD + POOLS
        + nodes(("a", "combined", "one", ON_0 + IN_GPU), ("b", "combined", "two", ON_0 + IN_GPU)),
        HEAD + nodes(("a", "combined", "one", ON_0),
                     ("b", "combined", "two", ON_0 + 'host = "10.0.0.2"'))
        .replace('model = "two"', 'model = "two"\nssh = "other"'),
    ],
)  # fmt: skip
def test_what_is_no_mistake(text: str) -> None:
    trusted = text.replace("[[edges]]", "[routing]\nnetwork_trusted = true\n[[edges]]")
    assert parse(trusted).regions[0].nodes
