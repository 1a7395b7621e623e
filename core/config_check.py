"""What types cannot say of a topology: names are unique, references lead somewhere, numbers are
finite, and nothing is open to a network that is not trusted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.address import is_loopback, split_address
from core.config_locate import Path, Step
from core.config_pools import device_complaints, pool_complaints
from core.config_scale import scale_complaints
from core.config_secrets import split_reference
from core.config_tenants import tenant_complaints
from core.errors import ConfigError
from core.nearest import did_you_mean
from core.parallel import refusal
from core.types import Role

if TYPE_CHECKING:  # core.config has the types and imports this module
    from core.config import Topology


@dataclass(frozen=True, slots=True)
class Complaint:
    """`path` leads to the value in question."""

    path: Path
    what: str


def not_finite(value: object, path: Path = ()) -> Iterator[Complaint]:
    """TOML knows nan and inf; no key of a topology means anything by them."""
    items: Iterator[tuple[Step, object]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = iter(enumerate(value))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Complaint(path, f"{path[-1]}: {value} is no number to work with")
    for step, item in items:
        yield from not_finite(item, (*path, step))


def complaints(topology: Topology) -> Iterator[Complaint]:
    """What is wrong, the first thing first; nothing for a good topology."""
    if not topology.edges or not topology.regions or not topology.models:
        yield Complaint((), "a world needs at least one edge, one region and one model")
    yield from _repeated(_names(topology), "the name {!r} is used more than once")
    yield from _repeated(_labels(topology), "the model name or alias {!r} is used more than once")
    yield from _bad_references(topology)
    yield from _bad_nodes(topology)
    yield from _bad_addresses(topology)
    yield from _repeated(_doors(topology), "the address {!r} is listened on by more than one edge")
    yield from (Complaint(path, what) for path, what in tenant_complaints(topology))
    for which in ("region", "fleet", "admin", "tiers", "redis"):
        try:
            if (reference := getattr(topology.secrets, which)) is not None:
                split_reference(which, reference)
        except ConfigError as error:
            yield Complaint(("secrets", which), str(error))


def _names(topology: Topology) -> Iterator[tuple[Path, str]]:
    for place, edge in enumerate(topology.edges):
        yield ("edges", place, "name"), edge.name
    for place, region in enumerate(topology.regions):
        yield ("regions", place, "name"), region.name
        for seat, node in enumerate(region.nodes):
            yield ("regions", place, "nodes", seat, "name"), node.name


def _labels(topology: Topology) -> Iterator[tuple[Path, str]]:
    for name in topology.models:
        yield ("models", name), name
    for name, model in topology.models.items():
        for alias in model.aliases:
            yield ("models", name, "aliases"), alias


def _doors(topology: Topology) -> Iterator[tuple[Path, str]]:
    """Where edges listen. At port 0 the system finds each one of its own; edges that listen on
    every address of their machine may be on several machines."""
    for place, edge in enumerate(topology.edges):
        for key, address in (("listen", edge.listen), ("admin", edge.admin or ":0")):
            if not address.endswith(":0") and not address.startswith(("0.0.0.0:", "[::]:")):
                yield ("edges", place, key), address


def _repeated(named: Iterator[tuple[Path, str]], what: str) -> Iterator[Complaint]:
    seen: set[str] = set()
    for path, name in named:
        if name in seen:
            yield Complaint(path, what.format(name))
        seen.add(name)


def _bad_references(topology: Topology) -> Iterator[Complaint]:
    """Regions that are named where there are none."""
    known = {region.name for region in topology.regions}
    for place, edge in enumerate(topology.edges):
        for name in edge.round_trip_ms:
            if name not in known:
                yield Complaint(
                    ("edges", place, "round_trip_ms", name),
                    f"edge {edge.name!r} has a round trip to {name!r}, which is no region"
                    f"{_near(name, known)}",
                )
    for key, regions in topology.residency.items():
        path: Path = ("residency", key)
        if not regions:
            yield Complaint(
                path, f"the residency of namespace {key!r} is empty: it could be served nowhere"
            )
        yield from _bad_residency(path, f"namespace {key!r}", regions, known)
    for key, model in topology.models.items():
        where = ("models", key, "residency")
        yield from _bad_residency(where, f"model {key!r}", model.residency, known)


def _bad_residency(
    path: Path, what: str, regions: Sequence[str], known: Collection[str]
) -> Iterator[Complaint]:
    for name in sorted(set(regions).difference(known)):
        near = _near(name, known)
        yield Complaint(path, f"the residency of {what} names {name!r}, which is no region{near}")


def _near(name: str, known: Collection[str]) -> str:
    hint = did_you_mean(name, known, f"there are: {', '.join(sorted(known))}")
    return f"; {hint}" if known else ""


def _bad_nodes(topology: Topology) -> Iterator[Complaint]:
    for place, region in enumerate(topology.regions):
        for seat, node in enumerate(region.nodes):
            path = ("regions", place, "nodes", seat)
            if node.model not in topology.models:
                yield Complaint(
                    (*path, "model"),
                    f"node {node.name!r} serves {node.model!r}, which is not under [models]"
                    f"{_near(node.model, topology.models)}",
                )
            if (why := refusal(node.parallel)) is not None:
                yield Complaint((*path, "parallel"), f"node {node.name!r}: {why}")
            if len(set(node.gpus)) < len(node.gpus):
                yield Complaint((*path, "gpus"), f"node {node.name!r} names a CUDA device twice")
            if node.gpus and node.device != "cuda":
                yield Complaint((*path, "gpus"), f'node {node.name!r}: gpus need device = "cuda"')
            if node.host in ("0.0.0.0", "::"):
                yield Complaint(
                    (*path, "host"),
                    f"node {node.name!r}: peers send KV to {node.host}, no address to dial",
                )
            why = _bad_transports(node.transports, trusted=topology.routing.network_trusted)
            if why is not None:
                yield Complaint((*path, "transports"), f"node {node.name!r}: {why}")
        for below, what in scale_complaints(region):
            yield Complaint(("regions", place, "scale", *below), what)
        for under, what in (*pool_complaints(region), *device_complaints(region)):
            yield Complaint(("regions", place, *under), what)
        for model in sorted({node.model for node in region.nodes}):
            roles = {node.role for node in region.nodes if node.model == model}
            if roles == {Role.PREFILL}:
                yield Complaint(
                    ("regions", place),
                    f"region {region.name!r} has no node that can decode {model!r}",
                )


def _bad_transports(listed: Sequence[str], *, trusted: bool) -> str | None:
    if not listed or len(set(listed)) != len(listed):
        return "transports lists at least one way, and none twice"
    if "mooncake" in listed and not trusted:
        return (
            "mooncake opens ports on every address of the machine, and whoever reaches them may "
            "read and write KV; set routing.network_trusted = true where the network keeps others "
            "out, or leave it away"
        )
    return None


def _bad_addresses(topology: Topology) -> Iterator[Complaint]:
    """Plaintext and callers without keys stay on loopback unless the operator says otherwise."""
    for path, owner, address in _addresses(topology):
        try:
            host, _ = split_address(address)
        except ConfigError as error:
            yield Complaint(path, f"{owner}: {error}")
            continue
        guarded = path[0] == "regions" and topology.tls.inside
        if path[0] == "edges" and path[-1] == "listen":
            guarded = topology.edges[int(path[1])].tls is not None
        if not (guarded or topology.routing.network_trusted or is_loopback(host)):
            yield Complaint(
                path,
                f"{owner} listens on {address}, in plaintext and without keys; keep to loopback, "
                "say `[tls] inside = true` (regions and nodes), give an edge a certificate for "
                "its callers (tls = { certificate, key }), "
                "or set routing.network_trusted = true where the network keeps others out",
            )


def _addresses(topology: Topology) -> Iterator[tuple[Path, str, str]]:
    for place, edge in enumerate(topology.edges):
        yield ("edges", place, "listen"), f"edge {edge.name!r}", edge.listen
        if edge.admin is not None:
            yield ("edges", place, "admin"), f"the admin of edge {edge.name!r}", edge.admin
    for place, region in enumerate(topology.regions):
        yield ("regions", place, "http"), f"region {region.name!r}", region.http
        yield ("regions", place, "grpc"), f"region {region.name!r}", region.grpc
        for seat, router in enumerate(region.routers):
            who = f"router {seat + 2} of region {region.name!r}"
            yield ("regions", place, "routers", seat, "http"), who, router.http
            yield ("regions", place, "routers", seat, "grpc"), who, router.grpc
        for seat, node in enumerate(region.nodes):
            path = ("regions", place, "nodes", seat, "host")
            yield path, f"node {node.name!r}", f"{node.host}:0"
