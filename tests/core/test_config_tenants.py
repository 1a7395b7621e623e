"""Tenants, access and prices in a topology: every mistake is named with its line."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from core.config import Topology, World, parse
from core.errors import ConfigError
from core.types import RegionName
from deploy.toml_write import dump
from tests.core.test_config import GOOD

TENANTS = """
[access]
anonymous = "until-keys"

[tenants.acme]
namespace = "shared"
regions = ["eu"]
models = ["small"]
priority = 2
requests_per_minute = 60
tokens_per_minute = 10_000
tokens_per_day = 100_000
concurrent_streams = 4

[tenants.twin]
namespace = "shared"
regions = ["eu"]

[tenants.plain]

[budgets]
lease = 0.2
when_redis_is_lost = "allow"

[models.tiny.price]
input = 0.1
cached_input = "0.02"
output = 3
"""
FULL = GOOD + TENANTS


def good() -> Topology:
    return parse(FULL)


def test_a_good_one() -> None:
    topology = good()
    assert topology.access.anonymous == "until-keys"
    assert topology.tenants["acme"].tokens_per_day == 100_000
    assert topology.tenants["plain"].requests_per_minute is None
    spaces = {name: topology.namespace_of(name) for name in ("acme", "twin", "plain", "anonymous")}
    assert spaces == {"acme": "shared", "twin": "shared", "plain": "plain", "anonymous": ""}
    price = topology.models["tiny"].price
    assert price is not None
    assert (price.input, price.cached_input, price.output) == (
        Decimal("0.1"), Decimal("0.02"), Decimal(3),
    )  # fmt: skip


def test_a_tenants_regions_hold_for_its_namespace() -> None:
    topology = good()
    assert topology.residency_of("shared", "tiny") == frozenset({RegionName("eu")})
    assert topology.residency_of("plain", "tiny") is None
    assert topology.residency_of("", "tiny") is None


def test_it_is_written_and_read_back_the_same() -> None:
    assert parse(dump(good())) == good()


def test_doors_are_closed_unless_the_topology_says_so() -> None:
    assert parse(GOOD).access.anonymous == "never"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("tokens_per_minute", "token_per_minute", "t:31: tenants.acme: unknown key 'token_per_min"
         "ute'; did you mean 'tokens_per_minute'?"),
        ("[tenants.plain]", "[tenant.plain]", "did you mean 'tenants'?"),
        ("tokens_per_day = 100_000", "tokens_per_day = 0", "t:32: tenants.acme.tokens_per_day"),
        ("priority = 2", "priority = -1", "t:29: tenants.acme.priority"),
        ("[tenants.plain]", '[tenants."A b"]', "A b|tenants"),
        ('anonymous = "until-keys"', 'anonymous = "yes"', "known here: always, never, until-keys"),
        ("lease = 0.2", "lease = 1.5", "lease"),
        ("lease = 0.2", "lease = 0", "lease"),
        ("lease = 0.2", 'redis = "cache:6379"', "budgets.redis: expected `str` matching"),
        ('= "allow"', '= "alow"', "known here: allow, refuse"),
        ("input = 0.1", "input = -0.1", "t:46: input: -0.1 is no price"),
        ("output = 3", 'output = "NaN"', "output: NaN is no price"),
        ("output = 3", 'output = "much"', "models.tiny.price.output"),
        ('models = ["small"]', 'models = ["smal"]', "t:28: tenant 'acme' names 'smal', which"),
        ('regions = ["eu"]\nmodels', 'regions = ["us"]\nmodels', "t:27: tenant 'acme' names 'us'"),
        ('namespace = "shared"\nregions = ["eu"]\n\n[tenants.plain]',
         'namespace = "shared"\n\n[tenants.plain]', "share the namespace 'shared'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(old: str, new: str, complaint: str) -> None:
    assert FULL.count(old) >= 1
    with pytest.raises(ConfigError, match=complaint):
        parse(FULL.replace(old, new, 1), name="t")


def test_nobody_comes_in_from_a_network_without_a_key() -> None:
    text = FULL.replace('name = "here"', 'name = "here"\nlisten = "0.0.0.0:8787"', 1)
    trusted = text.replace("depth = 3", "depth = 3\nnetwork_trusted = true")
    with pytest.raises(ConfigError, match=r"t:\d+: edge 'here' listens on 0.0.0.0:8787, and call"):
        parse(trusted, name="t")
    closed = trusted.replace('anonymous = "until-keys"', 'anonymous = "never"')
    assert parse(closed).edges[0].listen == "0.0.0.0:8787"


def test_redis_has_its_password_already(tmp_path: Path) -> None:
    topology = parse(GOOD + '[secrets]\nredis = "file:redis.secret"\n')
    world = World(topology=topology, path=tmp_path / "t.toml", state=tmp_path)
    with pytest.raises(ConfigError, match=r"redis\.secret does not exist"):
        world.secret("redis")
    (tmp_path / "redis.secret").write_text("a-password-for-tests\n")
    assert world.secret("redis") == b"a-password-for-tests"
    with pytest.raises(ConfigError, match="neither file:PATH nor env:NAME"):
        parse(GOOD + '[secrets]\nredis = "hunter2"\n')
