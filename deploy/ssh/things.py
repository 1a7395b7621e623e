"""What a host's processes need beside their release and topology: secrets, certificates, keys, and
models that lie in files."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from core.config import Topology, World
from core.config_secrets import split_reference
from core.errors import ConfigError
from core.tls import Files
from deploy.digests import digest_of, files_of
from deploy.rollout.steps import Kind
from deploy.ssh.channel import Host, sha256_of
from deploy.ssh.hosts import Seat
from deploy.ssh.units import Place

PACKAGE = "package:"
SECRET_MODE = 0o600


def secrets_of(topology: Topology, seats: Iterable[Seat]) -> tuple[str, ...]:
    """Names of the secrets that these processes read. Pure."""
    found: dict[str, None] = {}
    for seat in seats:
        found["region"] = None
        if seat.kind is Kind.EDGE:
            found["fleet"] = None
            if topology.edge(seat.name).admin:
                found["admin"] = None
            if topology.secrets.redis is not None:
                found["redis"] = None
        if seat.kind is Kind.NODE and topology.node(seat.name)[1].disk_tier is not None:
            found["tiers"] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class File:
    """What is to lie at `path` on a host. `what` names it to the operator."""

    path: str
    data: bytes
    mode: int
    what: str


def agree_on_secrets(
    world: World, hosts: Collection[Host], place_of: Callable[[Host], Place]
) -> None:
    """One value of each secret file, here and on all hosts: what a host has is taken over where
    there is none here, and nothing is overwritten. Raises ConfigError where they differ."""
    for which in _file_secrets(world.topology):
        path = _file(world, which)
        for host in hosts:
            there = host.read(_there(place_of(host), world, which))
            if there is None:
                continue
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
                fresh.touch(mode=SECRET_MODE)
                fresh.write_text(there, encoding="utf-8")
                fresh.replace(path)
            elif path.read_text(encoding="utf-8").strip() != there.strip():
                raise ConfigError(
                    f"{host.name}: its secret {which!r} differs from {path}: this world was "
                    "deployed with another one. Give --state a folder with the same secrets, or "
                    f"remove {path} to take those of {host.name}"
                )


def files(world: World, seats: Sequence[Seat], place: Place) -> Iterator[File]:
    """All that `seats` read, but keys and models. Secrets that are not there are made. Raises
    ConfigError, which says how to make what is missing."""
    variables: dict[str, str] = {}
    for which in secrets_of(world.topology, seats):
        kind, rest = split_reference(which, getattr(world.topology.secrets, which))
        value = world.secret(which)
        if kind == "env":
            variables[rest] = value.decode()
        else:
            yield File(_there(place, world, which), value, SECRET_MODE, f"secret {which}")
    if variables:
        text = "".join(f'{name}="{_quoted(value)}"\n' for name, value in variables.items())
        yield File(variables_file(place), text.encode(), SECRET_MODE, "secrets from variables")
    tls = world.topology.tls
    if tls.inside:
        for seat in seats:
            yield from _certificates(world, seat, f"{place.state}/{tls.folder}")
    for seat in seats:
        if seat.kind is Kind.EDGE:
            yield from _public(world, seat.name, place)


def variables_file(place: Place) -> str:
    return f"{place.home}/secrets.env"


def uses_variables(topology: Topology, seats: Sequence[Seat]) -> bool:
    """Whether one of their secrets is `env:NAME`. Pure."""
    return any(
        getattr(topology.secrets, which).startswith("env:") for which in secrets_of(topology, seats)
    )


def paths(world: World, seats: Sequence[Seat], place: Place) -> Iterator[str]:
    """Where `files` go, without reading or making any."""
    topology = world.topology
    for which in secrets_of(topology, seats):
        if getattr(topology.secrets, which).startswith("file:"):
            yield _there(place, world, which)
    if uses_variables(topology, seats):
        yield variables_file(place)
    if topology.tls.inside:
        folder = f"{place.state}/{topology.tls.folder}"
        yield f"{folder}/ca.crt"
        yield from (f"{folder}/{seat.name}.{end}" for seat in seats for end in ("crt", "key"))


def put_keys(host: Host, goal: Place, release: str, topology: str, world: World) -> None:
    """Keys that were made here are good there too, and what was revoked is not; what the host knows
    itself stays. For hosts with edges. `release`, `topology`: on the host. Raises HostFailed."""
    name = world.topology.access.keys
    mine = world.state / name
    if os.path.isabs(name) or not mine.exists():
        return
    fresh = f"{goal.home}/keys.import"
    host.write(fresh, mine.read_bytes(), SECRET_MODE)
    try:
        host.must(
            "taking in keys", f"{release}/bin/python", "-P", "-m", "deploy.cli", "keys", "import",
            fresh, "--topology", topology, "--state", goal.state,
        )  # fmt: skip
    finally:
        host.remove(fresh)


def put_files(host: Host, wanted: Iterable[File]) -> Iterator[str]:
    """What was not there, or not so; said once it is."""
    for one in wanted:
        if host.digest(one.path) != hashlib.sha256(one.data).hexdigest():
            host.write(one.path, one.data, one.mode)
            yield one.what


# ---------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """Where a host has a model that lies in files. `upload`: it is to be sent there first, and this
    is where it lies here."""

    model: str
    path: str
    upload: Path | None = None


def models_of(topology: Topology, seats: Iterable[Seat]) -> tuple[str, ...]:
    """The models whose files these processes read. Pure."""
    found: dict[str, None] = {}
    for seat in seats:
        if seat.kind is Kind.NODE:
            found[topology.node(seat.name)[1].model] = None
        elif seat.kind is Kind.ROUTER:
            found |= dict.fromkeys(node.model for node in topology.region(seat.unit).nodes)
    return tuple(found)


def model_place(
    world: World, host: Host, place: Place, name: str, *, upload: bool, digests: dict[Path, str]
) -> ModelPlace | None:
    """None for one that comes as a package. `digests`: of what lies here, worked out once. Raises
    ConfigError where the host lacks it."""
    model = world.topology.models[name]
    if model.source.startswith(PACKAGE):
        return None
    if os.path.isabs(model.source) and host.kinds([model.source])[0]:
        return ModelPlace(name, model.source)
    here = Path(world.model_source(name))
    if here.exists():
        if here not in digests:
            digests[here] = digest_of(here)
        digest = digests[here]
    elif model.digest is not None:
        digest = model.digest
    else:
        raise ConfigError(
            f"{host.name}: model {name!r}: {model.source} is neither there nor here; put it there, "
            "at the absolute path that the topology names"
        )
    root = f"{place.root}/models/{digest.removeprefix('sha256:')[:32]}"
    there = f"{root}/{here.name}"
    if host.kinds([f"{root}/complete"])[0]:
        return ModelPlace(name, there)
    if not upload or not here.exists():
        raise ConfigError(
            f"{host.name}: model {name!r}: {model.source} is not there; put it there, at the "
            "absolute path that the topology names, or give --upload-models to send it"
        )
    if model.digest not in (None, digest):
        raise ConfigError(
            f"model {name!r}: {here} is not what the topology names: its digest is {digest}, and "
            f"models.{name}.digest is {model.digest}"
        )
    return ModelPlace(name, there, here)


def with_models_at(topology: Topology, models: Iterable[ModelPlace]) -> Topology:
    """With models where a host has them."""
    places = {one.model: one.path for one in models}
    return replace(
        topology,
        models={
            name: replace(model, source=places[name]) if name in places else model
            for name, model in topology.models.items()
        },
    )


def upload_model(host: Host, one: ModelPlace, sent: Callable[[int], None]) -> None:
    """Each file is compared with its digest where it arrives; what has arrived before stays."""
    assert one.upload is not None
    for file in files_of(one.upload):
        below = file.relative_to(one.upload) if one.upload.is_dir() else None
        path = one.path if below is None else f"{one.path}/{below.as_posix()}"
        digest = sha256_of(file)
        if host.digest(path) == digest:
            sent(file.stat().st_size)
        else:
            host.write(path, file, sha256=digest, sent=sent)
    host.write(f"{os.path.dirname(one.path)}/complete", b"")


def model_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def packages_of(topology: Topology, models: Iterable[str]) -> tuple[str, ...]:
    """Names of the packages that carry them. Pure."""
    sources = (topology.models[name].source for name in models)
    return tuple(
        dict.fromkeys(one.removeprefix(PACKAGE) for one in sources if one.startswith(PACKAGE))
    )


# ---------------------------------------------------------------------- inside


def _file_secrets(topology: Topology) -> Iterator[str]:
    for which in ("region", "fleet", "admin", "tiers", "redis"):
        reference: str | None = getattr(topology.secrets, which)
        if reference is not None and reference.startswith("file:"):
            yield which


def _file(world: World, which: str) -> Path:
    return world.state / split_reference(which, getattr(world.topology.secrets, which))[1]


def _there(place: Place, world: World, which: str) -> str:
    reference = split_reference(which, getattr(world.topology.secrets, which))[1]
    return os.path.join(place.state, reference)


def _certificates(world: World, seat: Seat, folder: str) -> Iterator[File]:
    here = Files.of(world.state / world.topology.tls.folder, seat.name)
    pairs: Mapping[str, tuple[Path, int]] = {
        "ca.crt": (here.authority, 0o644),
        f"{seat.name}.crt": (here.certificate, 0o644),
        f"{seat.name}.key": (here.key, SECRET_MODE),
    }
    for name, (path, mode) in pairs.items():
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; `skerry certs init` makes what [tls] inside needs"
            ) from error
        yield File(f"{folder}/{name}", data, mode, f"certificate {name}")


def _public(world: World, edge: str, place: Place) -> Iterator[File]:
    """The edge's own certificate, where it lies in the state folder here; one by an absolute path
    is the host's own affair, and what renews it there as well."""
    tls = world.topology.edge(edge).tls
    if tls is None:
        return
    for name, mode in ((tls.certificate, 0o644), (tls.key, SECRET_MODE)):
        path = world.state / name
        if not os.path.isabs(name) and path.exists():
            yield File(f"{place.state}/{name}", path.read_bytes(), mode, f"certificate {name}")


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')
