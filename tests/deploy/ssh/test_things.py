"""Secrets, certificates and models: who gets which, and what is missing is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from core.config import DiskTier, Tls, Topology, World
from core.errors import ConfigError
from deploy.digests import digest_of
from deploy.ssh import things
from deploy.ssh.channel import Host
from deploy.ssh.hosts import Seat, seats
from deploy.ssh.units import Place
from tests.deploy.ssh.world import topology

PLACE = Place("/opt/skerry", "far")


@dataclass
class FakeHost:
    """A host's files."""

    name: str
    files: dict[str, str] = field(default_factory=dict)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def kinds(self, paths: list[str]) -> list[str]:
        return ["file" if path in self.files else "" for path in paths]


@pytest.fixture
def world(tmp_path: Path) -> World:
    given = replace(topology(tmp_path, tmp_path / "ssh_config"), tls=Tls())
    return World(given, tmp_path / "far.toml", tmp_path / "state")


def on(given: Topology, *names: str) -> list[Seat]:
    return [seats(given)[name] for name in names]


def agree(world: World, *hosts: FakeHost) -> None:
    things.agree_on_secrets(world, cast("list[Host]", list(hosts)), lambda host: PLACE)


def test_each_process_has_the_secrets_that_it_reads(world: World) -> None:
    given = world.topology
    assert things.secrets_of(given, on(given, "eu", "eu-decode")) == ("region",)
    assert things.secrets_of(given, on(given, "nyc")) == ("region", "fleet")
    edge = replace(given.edges[0], admin="127.0.0.1:9001")
    nodes = (replace(given.regions[0].nodes[0], disk_tier=DiskTier()),)
    more = replace(given, edges=(edge,), regions=(replace(given.regions[0], nodes=nodes),))
    assert things.secrets_of(more, on(more, "nyc")) == ("region", "fleet", "admin")
    assert things.secrets_of(more, on(more, "eu-prefill")) == ("region", "tiers")


def test_a_secret_is_made_once_and_taken_over_from_a_host(world: World) -> None:
    there = f"{PLACE.state}/region.secret"
    agree(world, FakeHost("alpha"), FakeHost("beta", {there: "of-another-machine"}))
    assert world.secret("region") == b"of-another-machine"
    assert (world.state / "region.secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="alpha: its secret 'region' differs"):
        agree(world, FakeHost("alpha", {there: "of-a-third-machine"}))
    assert world.secret("region") == b"of-another-machine"


def test_a_secret_of_a_variable_goes_into_a_file_of_variables(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(
        world.topology, secrets=replace(world.topology.secrets, region="env:FAR_REGION")
    )
    monkeypatch.setenv("FAR_REGION", 'quite "long" enough')
    own = on(given, "eu")
    (file,) = things.files(World(given, world.path, world.state), own, PLACE)
    assert (file.path, file.mode) == ("/opt/skerry/far/secrets.env", 0o600)
    assert file.data == b'FAR_REGION="quite \\"long\\" enough"\n'
    assert things.uses_variables(given, own)


def test_certificates_that_are_not_made_are_asked_for(world: World) -> None:
    given = replace(world.topology, tls=replace(world.topology.tls, inside=True))
    described = World(given, world.path, world.state)
    with pytest.raises(ConfigError, match="`skerry certs init`"):
        list(things.files(described, on(given, "eu"), PLACE))
    folder = world.state / "certs"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ca.crt", "eu.crt", "eu.key"):
        (folder / name).write_text(name, encoding="ascii")
    modes = {one.path: one.mode for one in things.files(described, on(given, "eu"), PLACE)}
    assert modes == {
        f"{PLACE.state}/region.secret": 0o600,
        f"{PLACE.state}/certs/ca.crt": 0o644,
        f"{PLACE.state}/certs/eu.crt": 0o644,
        f"{PLACE.state}/certs/eu.key": 0o600,
    }
    assert set(modes) == set(things.paths(described, on(given, "eu"), PLACE))


def place_of_model(world: World, host: FakeHost, *, upload: bool = False) -> things.ModelPlace:
    found = things.model_place(world, cast("Host", host), PLACE, "tiny", upload=upload, digests={})
    assert found is not None
    return found


@pytest.fixture
def uploaded(world: World) -> str:
    """Where the model lies on a host that it was sent to."""
    digest = digest_of(world.path.parent / "tiny").removeprefix("sha256:")
    return f"/opt/skerry/models/{digest[:32]}"


def test_a_model_is_where_the_host_has_it(world: World, uploaded: str) -> None:
    sent = FakeHost("beta", {f"{uploaded}/complete": ""})
    assert place_of_model(world, sent) == things.ModelPlace("tiny", f"{uploaded}/tiny")
    here = world.path.parent / "tiny"
    to_send = place_of_model(world, FakeHost("beta"), upload=True)
    assert to_send == things.ModelPlace("tiny", f"{uploaded}/tiny", here)
    models = {"tiny": replace(world.topology.models["tiny"], source="/srv/models/tiny")}
    absolute = World(replace(world.topology, models=models), world.path, world.state)
    has_it = FakeHost("beta", {"/srv/models/tiny": ""})
    assert place_of_model(absolute, has_it) == things.ModelPlace("tiny", "/srv/models/tiny")
    with pytest.raises(ConfigError, match=r"beta: model 'tiny': .* neither there nor here"):
        place_of_model(absolute, FakeHost("beta"))


def test_a_model_that_a_host_lacks_is_named_with_the_option(world: World) -> None:
    with pytest.raises(ConfigError, match=r"beta: model 'tiny': tiny is not there; .*--upload-mod"):
        place_of_model(world, FakeHost("beta"))
    wrong = replace(world.topology.models["tiny"], digest=f"sha256:{'0' * 64}")
    other = World(replace(world.topology, models={"tiny": wrong}), world.path, world.state)
    with pytest.raises(ConfigError, match="is not what the topology names"):
        place_of_model(other, FakeHost("beta"), upload=True)


def test_packages_come_as_wheels(world: World) -> None:
    given = world.topology
    model = replace(given.models["tiny"], source="package:keeper-model")
    packed = replace(given, models={"tiny": model})
    assert things.models_of(given, on(given, "nyc")) == ()
    assert things.models_of(given, on(given, "eu")) == ("tiny",)
    assert things.packages_of(packed, ("tiny",)) == ("keeper-model",)
    assert things.packages_of(given, ("tiny",)) == ()
