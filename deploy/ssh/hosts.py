"""Which process of a topology belongs on which host. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from core.address import is_loopback, split_address
from core.config import Edge, Region, Topology
from core.config_check import Complaint
from core.errors import ConfigError
from core.nearest import did_you_mean
from deploy.rollout.steps import Kind


@dataclass(frozen=True, slots=True)
class Seat:
    """One process: `unit` is the edge or region that is deployed with it."""

    name: str
    kind: Kind
    """EDGE, ROUTER or NODE."""
    unit: str
    host: str


def seats(topology: Topology) -> dict[str, Seat]:
    """Of all processes that have a host, by name."""
    return {seat.name: seat for seat in _seats(topology)}


def _seats(topology: Topology) -> Iterator[Seat]:
    for edge in topology.edges:
        if edge.ssh:
            yield Seat(edge.name, Kind.EDGE, edge.name, edge.ssh)
    for region in topology.regions:
        for name, _ in region.doors:
            if region.ssh:
                yield Seat(name, Kind.ROUTER, region.name, region.ssh)
        for node in region.nodes:
            if host := node.ssh or region.ssh:
                yield Seat(node.name, Kind.NODE, region.name, host)


def complaints(topology: Topology, unit: str) -> Iterator[Complaint]:
    """Why the edge or region `unit` cannot be put on hosts. Raises ConfigError for another name."""
    for place, edge in enumerate(topology.edges):
        if edge.name == unit:
            yield from _of_edge(("edges", place), edge)
            return
    for place, region in enumerate(topology.regions):
        if region.name == unit:
            yield from _of_region(("regions", place), region)
            return
    known = [*(one.name for one in topology.edges), *(one.name for one in topology.regions)]
    hint = did_you_mean(unit, known, f"there are: {', '.join(known)}")
    raise ConfigError(f"the topology has neither an edge nor a region {unit!r}; {hint}")


def notes(topology: Topology, unit: str) -> Iterator[str]:
    """What will not be found from other hosts, and is no error where it is meant so."""
    all_seats = seats(topology)
    for region in topology.regions:
        own = [seat for seat in all_seats.values() if seat.unit == region.name]
        if region.ssh is None or not own or unit not in (region.name, *_edges(topology)):
            continue
        dialling = {
            "grpc": {seat.host for seat in own} - {region.ssh},
            "http": {one.host for one in all_seats.values() if one.kind is Kind.EDGE}
            - {region.ssh},
        }
        for key, hosts in dialling.items():
            address = getattr(region, key)
            if hosts and is_loopback(split_address(address)[0]):
                yield (
                    f"regions.{region.name}.{key} is {address}: {', '.join(sorted(hosts))} will "
                    f"look for it on itself and not on {region.ssh}"
                )


def _edges(topology: Topology) -> tuple[str, ...]:
    return tuple(edge.name for edge in topology.edges)


def _of_edge(path: tuple[str | int, ...], edge: Edge) -> Iterator[Complaint]:
    if not edge.ssh:
        yield Complaint(path, f'edge {edge.name!r} has no host: give it ssh = "USER@HOST"')
    for key, address in (("listen", edge.listen), ("admin", edge.admin)):
        if address and split_address(address)[1] == 0:
            yield Complaint((*path, key), _unfixed(f"{key} of edge {edge.name!r}"))


def _of_region(path: tuple[str | int, ...], region: Region) -> Iterator[Complaint]:
    if not region.ssh:
        yield Complaint(
            path, f'region {region.name!r} has no host for its router: give it ssh = "USER@HOST"'
        )
    doors: Mapping[tuple[str | int, ...], str] = {
        (*path, "http"): region.http,
        (*path, "grpc"): region.grpc,
        **{
            (*path, "routers", seat, key): getattr(router, key)
            for seat, router in enumerate(region.routers)
            for key in ("http", "grpc")
        },
    }
    for where, address in doors.items():
        if split_address(address)[1] == 0:
            yield Complaint(where, _unfixed(f"{where[-1]} of region {region.name!r}"))
    if region.pools:
        yield Complaint(
            (*path, "pools"),
            f"region {region.name!r} has pools, whose nodes somebody has to start and stop: only "
            "`skerry up` does; take the pools out, or run that region with `skerry up` there",
        )


def _unfixed(what: str) -> str:
    return f"{what} needs a fixed port: processes on other hosts know it by this file alone"
