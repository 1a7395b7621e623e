"""A topology with one model more, or less."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from core.config import Edge, Model, Node, Pool, Region, Topology
from core.config_scale import Scale
from core.errors import ConfigError
from core.parallel import Plan
from core.types import Role
from deploy.rollout.messages import AddModel
from deploy.rollout.models import fresh_nodes, regions_with, with_model, without_model


def region(name: str, *nodes: Node, **more: Any) -> Region:
    return Region(name=name, nodes=nodes, http="127.0.0.1:1", grpc="127.0.0.1:2", **more)


def node(name: str, **more: Any) -> Node:
    return Node(**{"name": name, "role": Role.COMBINED, "model": "m", **more})


def topology(*regions: Region) -> Topology:
    models = {node.model: Model(source="x") for region in regions for node in region.nodes}
    return Topology(version=1, models=models, edges=(Edge(name="here"),), regions=regions)


SPLIT = topology(
    region("eu", node("eu-read", role=Role.PREFILL), node("eu-write", role=Role.DECODE, threads=3)),
    region("us", node("us-all", kv_tokens=4096)),
)


def added(world: Topology, name: str = "n", **more: Any) -> list[Node]:
    after = with_model(world, AddModel(name=name, source="/n.gguf", **more))
    return list(fresh_nodes(world, after))


def test_every_region_gets_a_node_like_its_first_that_decodes() -> None:
    eu, us = added(SPLIT)
    assert (eu.name, eu.role, eu.model, eu.threads) == ("eu-n", Role.COMBINED, "n", 3)
    assert (us.name, us.kv_tokens) == ("us-n", 4096)
    after = with_model(SPLIT, AddModel(name="n", source="/n.gguf"))
    assert regions_with(after, "n") == ["eu", "us"]
    assert without_model(after, "n") == SPLIT


def test_what_is_asked_for_is_had() -> None:
    one, two = added(
        SPLIT, regions=("us",), roles=(Role.PREFILL, Role.DECODE), like="eu-write", kv_tokens=64
    )
    assert [one.name, two.name] == ["us-n-prefill", "us-n-decode"]
    assert (two.threads, two.kv_tokens) == (3, 64)
    after = with_model(
        SPLIT, AddModel(name="n", source="/n", aliases=("second",), on_demand=True, context=99)
    )
    assert after.canonical_model("second") == "n"
    assert after.models["n"].context == 99
    assert after.regions[0].scale == {"n": Scale(least=0)}
    assert without_model(after, "second") == SPLIT


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("@cf/meta/llama-3.1-8b", "us-llama-3-1-8b"),
        ("///", "us-model"),
        ("ALL", "us-all-2"),
        ("x" * 70, "us-" + "x" * 40),
    ],
)
def test_names_of_nodes(name: str, given: str) -> None:
    assert [one.name for one in added(SPLIT, name, regions=("us",))] == [given]


def test_a_node_does_not_split_the_next_model_as_its_own() -> None:
    world = topology(region("eu", node("eu-a", parallel=Plan(tp=2))))
    assert added(world)[0].parallel == Plan()
    assert added(world, like="eu-a")[0].parallel == Plan(tp=2)


def test_gpus_are_never_guessed() -> None:
    given = node("eu-a", device="cuda", gpus=(0,), pool="cards")
    world = topology(
        region("eu", given, pools={"cards": Pool()}, scale={"m": Scale(least=0)}),
    )
    with pytest.raises(ConfigError, match="which GPUs of region 'eu' may n have"):
        added(world)
    assert added(world, gpus=(1, 2))[0].gpus == (1, 2)
    (shared,) = added(world, pool="cards")
    assert (shared.gpus, shared.pool) == ((0,), "cards")
    alone = replace(world.regions[0], nodes=(replace(given, pool=None),), pools={}, scale={})
    assert added(topology(alone), gpus=(3,))[0].pool is None


def test_a_pool_goes_with_its_last_node() -> None:
    world = topology(
        region(
            "eu", node("eu-m"), node("eu-n", model="n", pool="spare"),
            pools={"spare": Pool()}, scale={"n": Scale(least=0)},
        )
    )  # fmt: skip
    (eu,) = without_model(world, "n").regions
    assert (eu.pools, eu.scale, [one.name for one in eu.nodes]) == ({}, {}, ["eu-m"])


def test_the_last_model_of_a_region_stays() -> None:
    world = topology(region("eu", node("eu-m"), node("eu-n", model="n")), region("us", node("us")))
    with pytest.raises(ConfigError, match="region 'us' would have no node"):
        without_model(world, "m")
