"""All hosts of a topology, connected; what of the world runs there; and the way to it over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from msgspec.structs import replace

from core.address import split_address
from core.config import Edge, Topology, World, parse
from core.errors import ConfigError
from core.pins import believing, certificates_in
from core.tls import credentials_of
from deploy.inside import OPERATOR, router_url
from deploy.rollout.steps import Kind
from deploy.ssh.channel import Host, HostFailed
from deploy.ssh.hosts import Seat
from deploy.ssh.stage import Systemd
from deploy.ssh.units import Making, Place, made_from, service_name, unit_of
from deploy.state import folder_name

AT_ONCE = 16
"""Hosts that are spoken with at a time."""
RUNS = ("active", "reloading", "activating")


@dataclass(frozen=True, slots=True)
class Found:
    """A unit of the world on a host. `topology` None: it cannot be read by this release."""

    name: str
    unit: str
    service: str
    host: Host
    text: str
    making: Making
    topology: Topology | None
    runs: bool
    changing: bool
    """An earlier deploy of it did not come to its end."""
    before: str
    """The text that is put back where this deploy fails: that of the last one that did not."""


class Meeting:
    """`hosts`: who answers, by what the topology calls them; `absent`: why the others do not."""

    def __init__(self, world: World, hosts: Mapping[str, Host], absent: Mapping[str, str]) -> None:
        self.world = world
        self.hosts = hosts
        self.absent = absent
        self._name = folder_name(world.topology.name)
        self._pins: list[tuple[Host, Edge, ssl.SSLContext]] = []

    def place(self, host: Host) -> Place:
        return Place(host.facts.folder, self._name)

    def found(self) -> dict[str, Found]:
        """By process. Raises ConfigError where one is on two hosts."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            groups = list(pool.map(self._found_on, self.hosts.values()))
        all_found: dict[str, Found] = {}
        for one in (one for group in groups for one in group):
            other = all_found.get(one.name)
            if other is not None:
                raise ConfigError(
                    f"{one.name} has a unit on {other.host.name} and on {one.host.name}; stop the "
                    f"one that is wrong: {stopping(one)}"
                )
            all_found[one.name] = one
        return all_found

    def _found_on(self, host: Host) -> list[Found]:
        place, systemd = self.place(host), Systemd(host)
        prefix, suffix = service_name(self._name, "|").split("|")
        topologies: dict[str, Topology | None] = {}
        found: list[Found] = []
        changing = set(host.names(place.before("").rstrip("/")))
        for service in host.names(host.facts.units):
            if not (service.startswith(prefix) and service.endswith(suffix)):
                continue
            text = host.read(f"{host.facts.units}/{service}") or ""
            making = made_from(text)
            if making is None or not making.topology.startswith(f"{place.home}/"):
                continue  # of a world whose name begins like ours
            if making.topology not in topologies:
                topologies[making.topology] = _read(host, making.topology)
            state = systemd.properties(service)
            before = host.read(place.before(service)) if service in changing else None
            found.append(
                Found(
                    name=service.removeprefix(prefix).removesuffix(suffix),
                    unit=unit_of(text),
                    service=service,
                    host=host,
                    text=text,
                    making=making,
                    topology=topologies[making.topology],
                    runs=state.get("ActiveState") in RUNS,
                    changing=service in changing,
                    before=before or text,
                )
            )
        return found

    def client(self, seats: Mapping[str, Seat]) -> httpx.Client:
        """Reaches the edges and routers that `seen` names, through their hosts."""
        world, mounts = self.world, {}
        credentials = credentials_of(world, OPERATOR)
        for name, seat in seats.items():
            host = self.hosts.get(seat.host)
            if host is None or seat.kind is Kind.NODE:
                continue
            if seat.kind is Kind.EDGE:
                edge = world.topology.edge(name)
                url, address = away(edge).url, edge.listen
                verify: ssl.SSLContext | bool = self._pinned(host, edge)
            else:
                address = world.topology.router(name)[1].http
                url = router_url(world.topology, address)
                verify = credentials.client if credentials is not None else False
            mounts[url] = httpx.HTTPTransport(
                uds=str(host.forwards[address]), verify=verify, trust_env=False
            )
        self.look()
        return httpx.Client(mounts=mounts, trust_env=False, timeout=5.0)

    def look(self) -> None:
        """For the certificates that https edges show, or are about to: they come with a deploy."""
        for host, edge, context in self._pins:
            assert edge.tls is not None, "else nothing is pinned"
            state = self.place(host).state
            shown = host.read(f"{state}/shown/{edge.name}.crt") or ""
            given = host.read(str(Path(state, edge.tls.certificate))) or ""
            for one in (*certificates_in(shown.encode()), *certificates_in(given.encode())[:1]):
                context.load_verify_locations(cadata=one)

    def _pinned(self, host: Host, edge: Edge) -> ssl.SSLContext | bool:
        if edge.tls is None:
            return False
        context = believing()
        self._pins.append((host, edge, context))
        return context


def away(edge: Edge) -> Edge:
    """With an address that no other edge has: several may listen on the same one of their hosts."""
    return replace(edge, listen=f"{edge.name}.edge:{split_address(edge.listen)[1]}")


def seen(topology: Topology, running: Collection[str]) -> Topology:
    """As it is asked over ssh: with the edges of `running` alone."""
    return replace(
        topology, edges=tuple(away(edge) for edge in topology.edges if edge.name in running)
    )


def stopping(one: Found) -> str:
    """The command that an operator stops it with."""
    own = "--user " if one.host.facts.manager == "user" else ""
    return f"`ssh {one.host.name} systemctl {own}disable --now {one.service}`"


@contextmanager
def meeting(
    world: World, seats: Mapping[str, Seat], needed: Collection[str], say: Callable[[str], None]
) -> Iterator[Meeting]:
    """Connections to all hosts of the topology, until the end of the block. Raises HostFailed when
    one of `needed` does not answer; that others do not is said."""
    ssh = world.topology.ssh
    config = None if ssh.config is None else (world.path.parent / ssh.config).resolve()
    if config is not None and not config.exists():
        raise ConfigError(f"{world.path}: ssh.config: {config} does not exist")
    names = list(dict.fromkeys(seat.host for seat in seats.values()))

    def connect(name: str) -> Host | HostFailed:
        try:
            return Host(name, ssh, config, list(_addresses(world.topology, seats, name)))
        except HostFailed as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(names, pool.map(connect, names), strict=True))
    hosts = {name: one for name, one in answers.items() if isinstance(one, Host)}
    absent = {name: str(one) for name, one in answers.items() if isinstance(one, HostFailed)}
    try:
        failed = [why for name, why in absent.items() if name in needed]
        if failed:
            raise HostFailed("\n".join(failed))
        for why in absent.values():
            say(f"note: {why}; what runs there is not asked")
        yield Meeting(world, hosts, absent)
    finally:
        for host in hosts.values():
            host.close()


def _addresses(topology: Topology, seats: Mapping[str, Seat], host: str) -> Iterator[str]:
    for name, seat in seats.items():
        if seat.host != host:
            continue
        if seat.kind is Kind.EDGE:
            yield topology.edge(name).listen
        elif seat.kind is Kind.ROUTER:
            yield topology.router(name)[1].http


def _read(host: Host, path: str) -> Topology | None:
    try:
        return parse(host.read(path) or "", name=f"{host.name}:{path}")
    except ConfigError:
        return None


def each(hosts: Sequence[Host], what: Callable[[Host], None]) -> None:
    """Of all at once. Raises the first error, once all have ended."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [pool.submit(what, host) for host in hosts]
    for one in waiting:
        one.result()
