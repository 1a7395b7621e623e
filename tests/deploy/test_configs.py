"""`skerry config diff` and `schema`, and the note on memory."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from core.config import World, load, parse
from core.models.config import Latent, ModelConfig
from deploy.memory import bytes_per_token, check_memory
from deploy.topology_diff import as_it_would_run, changes, departing, rereads, restarts
from deploy.where import SHIPPED
from tests.deploy.test_cli import skerry

TEXT = (SHIPPED / "two-regions.toml").read_text()


def _edited(*pairs: tuple[str, str]) -> str:
    text = TEXT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize(
    ("old", "new", "said", "again", "told"),
    [
        ("concurrent_streams = 64", "concurrent_streams = 65",
         "~ tenants.lighthouse.concurrent_streams: 64 → 65", ["nyc", "ams"], []),
        ('name = "eu-decode-1"', 'name = "eu-decode-1"\nkv_tokens = 8192',
         "~ regions.eu.nodes.eu-decode-1.kv_tokens: 16384 → 8192", ["eu-decode-1"], ["eu"]),
        ('place = "Amsterdam"', 'place = "Amsterdam"\nworkers = 2',
         "~ edges.ams.workers: 1 → 2", ["ams"], []),
        ('place = "Amsterdam"', 'place = "Amsterdam"\nssh = "ams"', "~ edges.ams.ssh", [], []),
        ('place = "Frankfurt"', 'place = "Frankfurt"\nsplit_min_tokens = 64',
         "~ regions.eu.split_min_tokens: 256 → 64", [], ["eu"]),
        ('place = "Frankfurt"', 'place = "Frankfurt"\nscale.smollm2-135m-instruct.least = 0',
         "+ regions.eu.scale.smollm2-135m-instruct", [], ["eu"]),
        ('name = "us-decode-1"', 'name = "us-decode-2"', "+ regions.us.nodes.us-decode-2",
         ["us-decode-2"], ["us"]),
        ("input = 0.10", "input = 0.20", "~ models.smollm2-135m-instruct.price.input",
         ["nyc", "ams"], []),
        ('"smollm2", "default"', '"smollm2", "usual"', "~ models.smollm2-135m-instruct.aliases",
         ["nyc", "ams"], ["us", "eu"]),
    ],
)  # fmt: skip
def test_who_has_to_start_again_and_who_is_told(
    old: str, new: str, said: str, again: list[str], told: list[str]
) -> None:
    before, after = parse(TEXT), parse(_edited((old, new)))
    found = changes(before, after)
    assert [one for one in map(str, found) if one.startswith(said)]
    assert restarts(found, after) == again
    assert rereads(found, after) == told


def test_what_only_moved_in_the_file_is_no_change() -> None:
    before = parse(TEXT)
    moved = replace(before, regions=before.regions[::-1])
    assert moved != before
    assert changes(before, moved) == []


def test_the_first_edge_has_the_timers_of_workers() -> None:
    before = parse(TEXT)
    moved = replace(before, edges=before.edges[::-1])
    found = changes(before, moved)
    assert sorted(map(str, found)) == ["+ edges.ams.timers = true", "- edges.nyc.timers = true"]
    assert restarts(found, moved) == ["ams", "nyc"]
    without = replace(before, edges=tuple(replace(one, admin=None) for one in before.edges))
    assert changes(without, replace(without, edges=without.edges[::-1])) == []
    left = replace(before, edges=before.edges[1:])
    assert restarts(changes(before, left), left) == ["ams"]


def test_who_is_to_go_is_named() -> None:
    before = parse(TEXT)
    left = replace(before, regions=before.regions[1:], edges=before.edges[1:])
    assert departing(before, left) == ["us", "us-prefill-1", "us-decode-1", "nyc"]
    assert departing(left, before) == []


def test_ports_that_the_start_found_are_no_change(tmp_path: Path) -> None:
    path = tmp_path / "world.toml"
    virginia, second = 'place = "Virginia"\n', 'routers = [{ http = "127.0.0.1:0" }]\n'
    path.write_text(_edited((virginia, virginia + second)))
    given = load(path, state=tmp_path)
    running = parse(
        _edited(
            ('admin = "127.0.0.1:0"', 'admin = "127.0.0.1:4710"'),
            (virginia, f'{virginia}http = "127.0.0.1:4711"\n{second.replace(":0", ":4712")}'),
        )
    )
    assert changes(running, as_it_would_run(given, running)) == []
    given = load(SHIPPED / "two-regions.toml", state=tmp_path)
    assert len(changes(running, as_it_would_run(given, running))) == 1, "a router less"


def test_the_schema_takes_every_shipped_topology_and_refuses_a_typo() -> None:
    schema = json.loads(skerry("config", "schema").stdout)
    for path in sorted(SHIPPED.glob("*.toml")):
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    wrong = tomllib.loads(TEXT)
    wrong["edges"][0]["plase"] = "New York"
    with pytest.raises(jsonschema.ValidationError, match="plase"):
        jsonschema.validate(wrong, schema)


def test_the_command_says_both_sides_and_exits_1() -> None:
    done = skerry("config", "diff", "two-regions", "local")
    assert done.returncode == 1
    assert "- regions.us\n" in done.stdout
    assert "to be started: home, home-1, here\n" in done.stdout
    assert "to be started again: nobody\n" in done.stdout
    assert "to be drained and stopped: us, eu, us-prefill-1," in done.stdout
    same = skerry("config", "diff", "local", "local")
    assert (same.returncode, same.stdout) == (0, "no difference\n")


def test_pools_that_do_not_fit_are_said(tmp_path: Path) -> None:
    topology = parse(
        _edited(('name = "eu-decode-1"', 'name = "eu-decode-1"\nkv_tokens = 40_000_000'))
    )
    world = World(topology, tmp_path / "world.toml", tmp_path)
    notes = list(check_memory(world, free_mb=16_000))
    assert notes[0].startswith("node 'eu-decode-1': kv_tokens = 40000000 takes 921,600 MB")
    assert notes[1].startswith("all KV pools together take")
    assert list(check_memory(World(parse(TEXT), tmp_path / "w", tmp_path), free_mb=16_000)) == []


def test_of_nodes_that_share_a_place_the_largest_counts(tmp_path: Path) -> None:
    text = (SHIPPED / "pool.toml").read_text()
    small, large = ('pool = "only"\nkv_tokens = 100_000', 'pool = "only"\nkv_tokens = 200_000')
    head, one, two = text.split('pool = "only"')
    topology = parse(f"{head}{small}{one}{large}{two}")
    world = World(topology, tmp_path / "w", tmp_path)
    assert list(check_memory(world, free_mb=4_700)) == []
    assert list(check_memory(world, free_mb=4_600)) != []
    both = World(parse(f"{head}{small}{one}{large}{two}".replace("places = 1", "places = 2")),
                 tmp_path / "w", tmp_path)  # fmt: skip
    (note,) = check_memory(both, free_mb=4_700)
    assert note.startswith("all KV pools together take 6,912 MB")


def test_latent_kv_is_one_row_for_all_heads() -> None:
    config = ModelConfig(
        family="latent", vocab_size=8, hidden=8, layers=3, heads=4, kv_heads=1, head_dim=8,
        intermediate=8, context=8, norm_eps=0, rope_theta=1e4,
        latent=Latent(query_rank=0, rank=16, nope=4, rope=4, value=4),
    )  # fmt: skip
    assert bytes_per_token(config, "auto") == 3 * 20 * 2
