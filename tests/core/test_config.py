"""Topologies: every mistake is named with its line; secrets are made once and kept private."""

from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core.address import split_address
from core.config import Router, World, load, parse
from core.errors import ConfigError
from core.types import RegionName

GOOD = """version = 1

[routing]
depth = 3

[models.tiny]
source = "models/tiny.gguf"
aliases = ["small"]

[[edges]]
name = "here"
round_trip_ms = { eu = 5 }

[[regions]]
name = "eu"

[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "tiny"
"""


def test_a_good_one() -> None:
    topology = parse(GOOD)
    assert topology.routing.depth == 3
    assert topology.edge("here").listen == "127.0.0.1:8787"
    assert topology.canonical_model("small") == "tiny"
    assert topology.canonical_model("large") is None
    region, node = topology.node("eu-1")
    assert (region.name, node.role) == ("eu", "combined")


def test_further_routers_of_a_region_have_names_and_addresses() -> None:
    more = 'name = "eu"\nrouters = [{ http = "10.0.0.2:1", grpc = "10.0.0.2:2" }, {}]\n'
    text = GOOD.replace('name = "eu"\n', more, 1).replace("depth = 3", "network_trusted = true")
    topology = parse(text)
    [region] = topology.regions
    assert [name for name, _ in region.doors] == ["eu", "eu.2", "eu.3"]
    assert topology.router("eu") == (region, Router(region.http, region.grpc))
    assert topology.router("eu.2")[1] == Router("10.0.0.2:1", "10.0.0.2:2")
    with pytest.raises(ConfigError, match=r"eu, eu\.2, eu\.3"):
        topology.router("eu.4")
    with pytest.raises(ConfigError, match=r"t:\d+: router 2 of region 'eu'"):
        parse(text.replace("10.0.0.2:1", "nowhere"), name="t")


@pytest.mark.parametrize("name", ["two-regions", "five-regions", "local", "on-demand", "pool"])
def test_the_shipped_ones(name: str, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "deploy" / "topologies"
    world = load(folder / f"{name}.toml", state=tmp_path)
    assert world.topology.canonical_model("default") is not None


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("depth = 3", "dept = 3", "t:4: routing: unknown key 'dept'; did you mean 'depth'?"),
        ("aliases =", "alias =", "t:8: models.*unknown key 'alias'; did you mean 'aliases'?"),
        ("role =", "rolle =", "t:19: .*unknown key 'rolle'; did you mean 'role'?"),
        ("[routing]", "[ruoting]", "t:3: unknown key 'ruoting'; did you mean 'routing'?"),
        ("depth = 3", "depth = 0", "t:4: routing.depth: expected"),
        ('"combined"', '"both"', "t:19: .*role: .*'both'; known here: combined, decode, prefill"),
        ('name = "eu-1"', 'name = "EU 1"', "t:18: "),
        ("version = 1", "version = 2", "version is 2"),
        ("version = 1", "versio = 1", "`version` is missing"),
        ("depth = 3", "depth = ", "not TOML"),
        ('model = "tiny"', 'model = "huge"', "'huge', which is not under .*; there are: tiny"),
        ('model = "tiny"', 'model = "tinny"', "'tinny', which .*; did you mean 'tiny'"),
        ("{ eu = 5 }", "{ us = 5 }", "round trip to 'us'"),
        ('name = "here"', 'name = "eu"', "'eu' is used more than once"),
        ('["small"]', '["tiny"]', "'tiny' is used more than once"),
        ('"combined"', '"prefill"', "t:14: .*no node that can decode 'tiny'"),
        ("[[edges]]", "[[edge]]", "t:10: unknown key 'edge'; did you mean 'edges'?"),
        ("{ eu = 5 }", "{ eu = -5 }", "t:12: .*round_trip_ms.eu: expected `float` >= 0"),
        ("{ eu = 5 }", "{ eu = nan }", "t:12: eu: nan is no number"),
        ("{ eu = 5 }", "{ eu = inf }", "t:12: eu: inf is no number"),
        ("depth = 3", "load_ratio = nan", "t:4: load_ratio: nan is no number"),
        ("depth = 3", "short_prompt_bytes = -1", "t:4: .*expected `int` >= 0"),
        ('["small"]', '[]\nengine = "torsh"', "t:9: models.tiny.engine: .*: scripted, torch"),
        ('model = "tiny"', 'model = "tiny"\ndevice = "gpu"', "t:21: .*known here: auto, cpu"),
        ('model = "tiny"', 'model = "tiny"\ndtype = "int3"', "t:21: .*known here: auto, bfloat16"),
        ('model = "tiny"', 'model = "tiny"\nkv_tokens = 16', "t:21: .*kv_tokens: .* >= 32"),
        (
            'model = "tiny"',
            'model = "tiny"\ndisk_tier = { byte = 5 }',
            "t:21: .*disk_tier: unknown key 'byte'; did you mean 'bytes'?",
        ),
        (
            'model = "tiny"',
            'model = "tiny"\ndisk_tier = { bytes = 5 }',
            "t:21: .*bytes: .* >= 1048",
        ),
        ('model = "tiny"', 'model = "tiny"\ngpus = [1]', "t:21: node 'eu-1': gpus need device"),
        (
            'model = "tiny"',
            'model = "tiny"\ndevice = "cuda"\ngpus = [1, 1]',
            "t:22: node 'eu-1' names a CUDA device twice",
        ),
        ('model = "tiny"', 'model = "tiny"\ntransports = []', "t:21: node 'eu-1': .*at least one"),
        ('model = "tiny"', 'model = "tiny"\ntransports = ["tcp", "tcp"]', "t:21: .*none twice"),
        ('model = "tiny"', 'model = "tiny"\ntransports = ["mooncake"]', "t:21: .*network_trusted"),
        ('model = "tiny"', 'model = "tiny"\ntransports = ["rdma"]', "t:21: .*mooncake, shared"),
        (
            'model = "tiny"',
            'model = "tiny"\nhost_tier_bytes = -1',
            "t:21: .*host_tier_bytes: .* >= 0",
        ),
        ("[routing]", '[secrets]\ntiers = "x"\n[routing]', "t:4: .*neither file:PATH nor env"),
        ("[routing]", '[secrets]\nregion = "x"\n[routing]', "t:4: .*neither file:PATH nor env"),
        ("[routing]", '[secrets]\nfleet = "env:"\n[routing]', "t:4: .*neither file:PATH nor env"),
        ('name = "here"', 'name = "here"\nlisten = "127.0.0.1:²"', "t:12: .*is not HOST:PORT"),
        ('name = "here"', 'name = "here"\nlisten = "0.0.0.0:1"', "t:12: .*network_trusted"),
        (
            "[[regions]]",
            '[[edges]]\nname = "b"\n\n[[regions]]',
            "listened on by more than one edge",
        ),
        ('name = "eu"', 'name = "eu"\nhttp = "8787"', "t:16: region 'eu': '8787' is not HOST"),
    ],
)
def test_mistakes_are_named(old: str, new: str, complaint: str) -> None:
    assert GOOD.count(old) == 1 or old == "version = 1"
    with pytest.raises(ConfigError, match=complaint):
        parse(GOOD.replace(old, new), name="t")


def test_residency_is_a_set_of_known_regions() -> None:
    """Of a namespace, of a model, of both: what is in both sets; nothing, when they are apart."""
    two = GOOD + '[[regions]]\nname = "us"\n[[regions.nodes]]\nname = "us-1"\n'
    two += 'role = "combined"\nmodel = "tiny"\n'
    topology = parse(two + '[residency]\nacme = ["eu"]\nboth = ["us", "eu"]\n')
    assert topology.residency_of("", "tiny") is None
    assert topology.residency_of("acme", "tiny") == frozenset({RegionName("eu")})
    assert topology.residency_of("both", "tiny") == frozenset({RegionName("us"), RegionName("eu")})
    pinned = two.replace('aliases = ["small"]', 'residency = ["us"]')
    topology = parse(pinned + '[residency]\nacme = ["eu"]\n')
    assert topology.residency_of("", "tiny") == frozenset({RegionName("us")})
    assert topology.residency_of("acme", "tiny") == frozenset()
    with pytest.raises(ConfigError, match="namespace 'acme' names 'mars', which is no region"):
        parse(two + '[residency]\nacme = ["mars"]\n')
    with pytest.raises(ConfigError, match="model 'tiny' names 'mars', which is no region"):
        parse(two.replace('aliases = ["small"]', 'residency = ["mars"]'))
    with pytest.raises(ConfigError, match="'acme' is empty"):
        parse(two + "[residency]\nacme = []\n")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "eu-1"', 'name = "eu-1"\nhost = "0.0.0.0"', "'eu-1': .*no address to dial"),
        (
            'name = "here"',
            'name = "here"\nlisten = "8787"',
            "t:13: edge 'here': '8787' is not HOST",
        ),
    ],
)
def test_a_trusted_network_does_not_excuse_bad_addresses(
    old: str, new: str, complaint: str
) -> None:
    trusted = GOOD.replace("[routing]", "[routing]\nnetwork_trusted = true")
    parse(trusted)
    with pytest.raises(ConfigError, match=complaint):
        parse(trusted.replace(old, new), name="t")


def test_unknown_names_list_the_known() -> None:
    topology = parse(GOOD)
    for ask in (topology.edge, topology.region, topology.node):
        with pytest.raises(ConfigError, match="the topology has: "):
            ask("nowhere")


def test_of_several_models_the_wrong_one_is_named() -> None:
    """A mapping's complaint of its reader says only that some key of it is wrong."""
    two = GOOD.replace("[[edges]]", '[models.second]\nsource = "x"\ncontext = 0\n[[edges]]')
    with pytest.raises(ConfigError, match=r"t:12: models\.second\.context: expected"):
        parse(two, name="t")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_bytes(GOOD.encode() + b"# \xff\n")
    with pytest.raises(ConfigError, match=r"w\.toml:21: .*not UTF-8"):
        load(path, state=tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml", state=tmp_path)


def test_model_sources_start_at_the_topology(tmp_path: Path) -> None:
    path = tmp_path / "world.toml"
    path.write_text(GOOD)
    world = load(path, state=tmp_path)
    assert world.model_source("tiny") == str((tmp_path / "models" / "tiny.gguf").resolve())


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    ["", "host", ":80", "host:", "host:x", "host:70000", "host:²", "h:٣", "h:" + "9" * 5000],
)
def test_no_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address)


def _world(state: Path, secrets: str = "") -> World:
    return World(topology=parse(GOOD + secrets), path=state / "w.toml", state=state)


def test_a_secret_is_made_once_for_all_and_is_ours_alone(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    gate = threading.Barrier(8)

    def read(_: int) -> bytes:
        gate.wait(30)
        return _world(state).secret("region")

    with ThreadPoolExecutor(8) as pool:
        values = set(pool.map(read, range(8)))
    assert len(values) == 1
    (value,) = values
    assert len(value) >= 32
    assert stat.S_IMODE((state / "region.secret").stat().st_mode) == 0o600
    assert [one.name for one in state.iterdir()] == ["region.secret"]
    assert _world(state).secret("region") == value
    assert _world(state).secret("fleet") != value


def test_bad_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "region.secret").write_text("short")
    with pytest.raises(ConfigError, match="16 characters"):
        _world(tmp_path).secret("region")
    from_env = _world(tmp_path, '[secrets]\nregion = "env:SKERRY_TEST_SECRET"\n')
    with pytest.raises(ConfigError, match="SKERRY_TEST_SECRET is not set"):
        from_env.secret("region")
    monkeypatch.setenv("SKERRY_TEST_SECRET", "from-the-environment")
    assert from_env.secret("region") == b"from-the-environment"
    for unfit in ("too-short", "with a line\nbreak in it", "geheim wie Öl auf Wasser"):
        monkeypatch.setenv("SKERRY_TEST_SECRET", unfit)
        with pytest.raises(ConfigError, match="SKERRY_TEST_SECRET: a secret needs"):
            from_env.secret("region")
        (tmp_path / "region.secret").write_text(unfit, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"region\.secret: a secret needs"):
            _world(tmp_path).secret("region")


def test_a_disk_tier_lies_in_the_state_folder_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    for said, folder in (("", "tiers"), ('path = "elsewhere"', "elsewhere"), ('path = "/x"', "/x")):
        tier = f'model = "tiny"\ndisk_tier = {{ {said} }}'
        world = World(parse(GOOD.replace('model = "tiny"', tier)), tmp_path / "w.toml", tmp_path)
        _, node = world.topology.node("eu-1")
        assert world.tier_folder(node) == tmp_path / folder
    _, plain = _world(tmp_path).topology.node("eu-1")
    assert (_world(tmp_path).tier_folder(plain), plain.host_tier_bytes) == (None, 0)
