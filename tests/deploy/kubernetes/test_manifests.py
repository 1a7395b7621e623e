"""What is made of a topology is what Kubernetes takes, and its processes find each other by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from core.config import parse
from core.config_scale import Scale
from core.errors import ConfigError
from deploy.kubernetes.manifests import groups, in_cluster, manifests
from deploy.kubernetes.values import Values, read_values
from deploy.where import SHIPPED
from tests.deploy.test_cli import skerry

VERSION = "1.31"
TOPOLOGY = parse(
    """
version = 1
[models.big]
source = "/models/big"
[[edges]]
name = "ams"
[[regions]]
name = "eu"
[[regions.nodes]]
name = "eu-decode-1"
role = "decode"
model = "big"
device = "cuda"
parallel = { tp = 2 }
[[regions.nodes]]
name = "eu-decode-2"
role = "decode"
model = "big"
device = "cuda"
parallel = { tp = 2 }
[[regions.nodes]]
name = "eu-decode-3"
role = "decode"
model = "big"
threads = 8
[[regions.nodes]]
name = "reader"
role = "prefill"
model = "big"
"""
)


def of(unit: str, values: Values | None = None) -> list[dict[str, Any]]:
    return manifests(TOPOLOGY, unit, values or Values())


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("unit", ["ams", "eu"])
def test_kubernetes_takes_every_object(unit: str) -> None:
    objects = of(unit)
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)


def test_alike_nodes_share_a_set_whose_pods_have_their_names() -> None:
    found = [(g.prefix, g.first, [n.name for n in g.nodes]) for g in groups(TOPOLOGY.regions[0])]
    assert found == [
        ("eu-decode", 1, ["eu-decode-1", "eu-decode-2"]),
        ("eu-decode-3", 0, ["eu-decode-3"]),
        ("reader", 0, ["reader"]),
    ]


def test_a_pod_finds_itself_where_the_topology_says() -> None:
    objects = of("eu")
    written = parse(one(objects, "ConfigMap", "region-eu")["data"]["topology.toml"])
    region = written.regions[0]
    for name, host in ((node.name, node.host) for node in region.nodes):
        pod, service = host.split(".")[:2]
        owners = [o for o in objects if o["kind"] == "StatefulSet" and pod in _pods(o)]
        assert len(owners) == 1, name
        assert owners[0]["spec"]["serviceName"] == service
        assert one(objects, "Service", service)["spec"]["clusterIP"] == "None"
        arguments = owners[0]["spec"]["template"]["spec"]["containers"][0]["args"]
        called = arguments[arguments.index("--name") + 1]
        assert {"$(POD_NAME)": pod}.get(called, called) == name
    router, _, port = region.http.partition(":")
    assert router.split(".")[0] in _pods(one(objects, "StatefulSet", "eu-router"))
    assert int(port) in [p["port"] for p in one(objects, "Service", "eu-router")["spec"]["ports"]]
    assert written.secrets.region == "file:/run/secrets/skerry/region"


def _pods(stateful: dict[str, Any]) -> list[str]:
    spec = stateful["spec"]
    first = spec["ordinals"]["start"]
    name = stateful["metadata"]["name"]
    return [f"{name}-{n}" for n in range(first, first + spec["replicas"])]


def test_two_sets_of_one_prefix_have_names_of_their_own() -> None:
    objects = of("eu")
    sets = [o["metadata"]["name"] for o in objects if o["kind"] == "StatefulSet"]
    assert len(set(sets)) == len(sets)


def test_a_gpu_for_each_rank_and_the_machines_that_have_them() -> None:
    objects = of("eu", Values(gpu_selector={"card": "h200"}))
    decode = one(objects, "StatefulSet", "eu-decode")["spec"]["template"]["spec"]
    assert decode["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert decode["nodeSelector"] == {"card": "h200"}
    reader = one(objects, "StatefulSet", "reader")["spec"]["template"]["spec"]
    assert "nvidia.com/gpu" not in reader["containers"][0]["resources"]["limits"]
    assert "nodeSelector" not in reader


def test_nobody_else_reaches_routers_and_nodes() -> None:
    objects = of("eu")
    policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
    guarded = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    for item in objects:
        if item["kind"] == "StatefulSet":
            labels = item["spec"]["template"]["metadata"]["labels"]
            assert any(want.items() <= labels.items() for want in guarded)


def test_the_world_stays_one_world() -> None:
    written = in_cluster(TOPOLOGY, Values())
    assert [node.name for node in written.regions[0].nodes] == [
        node.name for node in TOPOLOGY.regions[0].nodes
    ]
    assert parse(one(of("ams"), "ConfigMap", "edge-ams")["data"]["topology.toml"]) == written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("replicas = 3", r"values.toml:1: unknown key 'replicas'"),
        ("[edges]\nleast = 0", r"values.toml:2: edges.least: expected `int` >= 1"),
        ("[edges]\nleast = 5\nmost = 2", r"edges.least is 5, which is more than edges.most, 2"),
        ('[node]\nmemory = "16 GB"', r"values.toml:2: node.memory"),
        ("port = 0", r"values.toml:1: port: expected `int` >= 1"),
        ("a =", r"values.toml: not TOML"),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "values.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_values(path)


def test_the_command_prints_what_it_would_apply() -> None:
    command = ("--topology", "two-regions", "--target", "kubernetes", "--dry-run")
    done = skerry("deploy", "eu", *command)
    assert done.returncode == 0, done.stderr
    kinds = [item["kind"] for item in yaml.safe_load_all(done.stdout)]
    assert kinds.count("StatefulSet") == 3
    unknown = skerry("deploy", "asia", *command)
    assert unknown.returncode == 2
    assert "no edge and no region is named 'asia'; the topology has: nyc, ams" in unknown.stderr


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_topology_can_be_put_into_a_cluster(path: Path) -> None:
    topology = parse(path.read_text())
    pooled = [region.name for region in topology.regions if region.pools]
    for name in [*(e.name for e in topology.edges), *(r.name for r in topology.regions)]:
        if name in pooled:
            with pytest.raises(ConfigError, match=rf"region '{name}' has pools .* `skerry up`"):
                manifests(topology, name, Values())
        else:
            assert len(manifests(topology, name, Values())) > 4
    assert pooled == (["home"] if path.stem == "pool" else [])


def _scaled(text: str, model: str = "big") -> list[dict[str, Any]]:
    """Of a region whose three alike readers are scaled."""
    nodes = "".join(
        f'[[regions.nodes]]\nname = "eu-node-{n}"\nrole = "combined"\nmodel = "{model}"\n'
        for n in (1, 2, 3)
    )
    topology = parse(
        f'version = 1\n[models."{model}"]\nsource = "/models/big"\n[[edges]]\nname = "ams"\n'
        f'[[regions]]\nname = "eu"\n{nodes}[regions.scale."{model}"]\n{text}'
    )
    return manifests(topology, "eu", Values())


@pytest.mark.parametrize(
    ("text", "bounds"), [("least = 0", (0, 3)), ("most = 2", (1, 2)), ("least = 2", (2, 3))]
)
def test_as_many_nodes_as_the_router_wants(text: str, bounds: tuple[int, int]) -> None:
    objects = _scaled(text)
    for item in objects:
        kubernetes_validate.validate(item, VERSION, strict=True)
    spec = one(objects, "HorizontalPodAutoscaler", "eu-node")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == bounds
    assert one(objects, "StatefulSet", "eu-node")["spec"]["replicas"] == bounds[0]
    (metric,) = spec["metrics"]
    assert metric["external"]["metric"] == {
        "name": "skerry_router_wanted_nodes",
        "selector": {"matchLabels": {"region": "eu", "model": "big", "role": "combined"}},
    }


def test_what_is_not_scaled_or_could_not_be_told_apart_stands_whole() -> None:
    assert not [o for o in of("eu") if o["kind"] == "HorizontalPodAutoscaler"]
    mixed = msgspec.structs.replace(TOPOLOGY.regions[0], scale={"big": Scale(least=0)})
    objects = manifests(msgspec.structs.replace(TOPOLOGY, regions=(mixed,)), "eu", Values())
    scaled = [o["metadata"]["name"] for o in objects if o["kind"] == "HorizontalPodAutoscaler"]
    assert scaled == ["reader"], "the decode nodes are two sets"


def test_a_model_that_no_label_can_name() -> None:
    with pytest.raises(ConfigError, match=r"'@cf/x'.* alias"):
        _scaled("least = 0", model="@cf/x")
