"""Ports: 0 becomes concrete, a busy one moves and says so, no two are equal."""

import socket
from pathlib import Path

import msgspec
import pytest

from core.address import split_address
from core.config import Router, Topology, parse
from core.errors import ConfigError
from deploy.ports import refuse_unfixed, resolve

DEFAULT = Path(__file__).parents[2] / "deploy" / "topologies" / "two-regions.toml"


def with_edge_ports(first: int, second: int) -> Topology:
    topology = parse(DEFAULT.read_text(encoding="utf-8"))
    ports = (first, second)
    edges = tuple(
        msgspec.structs.replace(edge, listen=f"127.0.0.1:{port}")
        for edge, port in zip(topology.edges, ports, strict=True)
    )
    return msgspec.structs.replace(topology, edges=edges)


def addresses(topology: Topology) -> list[str]:
    return [e.listen for e in topology.edges] + [
        address for r in topology.regions for address in (r.http, r.grpc)
    ]


def test_resolve_port_zero_gives_distinct_concrete_ports() -> None:
    resolved = resolve(with_edge_ports(0, 0))
    ports = [split_address(address)[1] for address in addresses(resolved.topology)]
    assert len(set(ports)) == 6
    assert all(port > 0 for port in ports)
    assert resolved.moves == ()


def test_further_routers_get_ports_of_their_own() -> None:
    topology = with_edge_ports(0, 0)
    regions = tuple(
        msgspec.structs.replace(region, routers=(Router(), Router())) for region in topology.regions
    )
    resolved = resolve(msgspec.structs.replace(topology, regions=regions)).topology
    doors = [router for region in resolved.regions for _, router in region.doors]
    ports = {split_address(at)[1] for one in doors for at in (one.http, one.grpc)}
    assert len(ports) == 12
    assert 0 not in ports
    refuse_unfixed(resolved, "file")
    last = msgspec.structs.replace(resolved.regions[1], routers=(Router(),))
    loose = msgspec.structs.replace(resolved, regions=(resolved.regions[0], last))
    with pytest.raises(ConfigError, match="fixed ports"):
        refuse_unfixed(loose, "file")


def test_resolve_free_port_is_kept(free_port: int) -> None:
    resolved = resolve(with_edge_ports(free_port, 0))
    assert resolved.topology.edges[0].listen == f"127.0.0.1:{free_port}"
    assert resolved.moves == ()


def test_resolve_busy_port_moves_on_and_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        resolved = resolve(with_edge_ports(port, 0))
    got = split_address(resolved.topology.edges[0].listen)[1]
    assert got > port
    assert [str(move) for move in resolved.moves] == [
        f"edge nyc: 127.0.0.1:{port} is in use, taking 127.0.0.1:{got}"
    ]


def test_resolve_same_port_twice_moves_the_second(free_port: int) -> None:
    resolved = resolve(with_edge_ports(free_port, free_port))
    first, second = (edge.listen for edge in resolved.topology.edges)
    assert first == f"127.0.0.1:{free_port}"
    assert second != first
    assert [move.who for move in resolved.moves] == ["edge ams"]


def test_resolve_address_of_another_machine_is_refused() -> None:
    topology = with_edge_ports(0, 0)
    elsewhere = msgspec.structs.replace(topology.edges[0], listen="192.0.2.1:8787")
    topology = msgspec.structs.replace(topology, edges=(elsewhere, topology.edges[1]))
    with pytest.raises(ConfigError, match=r"edge nyc: cannot listen on 192\.0\.2\.1"):
        resolve(topology)
