"""The topology: one TOML file that describes the world, and its checks.

Every process gets that file and its own name. Values are frozen; nothing is read from the
environment except secrets that the file refers to. Unknown keys and values that do not fit are
refused with file, line and the nearest known key (`core.config_locate`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from core.config_check import complaints, not_finite
from core.config_locate import explain, line_of
from core.config_models import Model, Scripted
from core.config_regions import DiskTier, Node, Pool, Region, Router
from core.config_secrets import read_secret
from core.config_tenants import ANONYMOUS, Access, Budgets, Tenant
from core.config_types import Amount, Count, Name, Positive, Seconds
from core.config_workers import Workers
from core.errors import ConfigError
from core.log import Form
from core.types import ModelName, RegionName

__all__ = [
    "DiskTier", "Edge", "EdgeTls", "Limits", "Model", "Node", "Observe", "Pool", "Region", "Router",
    "Routing", "Scripted", "Secrets", "Ssh", "Tls", "Topology", "World", "load", "parse", "read",
]  # fmt: skip

VERSION = 1


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Secrets(_Section, frozen=True):
    """References, never values: `file:PATH` (relative to the state folder, made at first start)
    or `env:NAME` (must be set for every process, never made)."""

    region: str = "file:region.secret"
    """Shared by edges, routers and nodes: opens the internal ports."""
    fleet: str = "file:fleet.secret"
    """Keys the route hashes: equal on all edges of a fleet, for as long as prefixes should stay."""
    admin: str = "file:admin.secret"
    """Opens the admin interface of Workers."""
    tiers: str = "file:tiers.secret"
    """What nodes keep on disk is encrypted with keys from it; with another one it is begun anew."""
    redis: str | None = None
    """Redis's password, where it wants one."""


class Routing(_Section, frozen=True):
    depth: Positive = 2
    """Blocks of 512 bytes of prompt text that make the route key."""
    short_prompt_bytes: Count = 1024
    """A prompt below this is answered by the nearest region: reading it again is cheaper than
    travelling."""
    load_ratio: Annotated[float, msgspec.Meta(ge=1.0)] = 1.5
    load_margin_s: Amount = 10.0
    """A region is full above max(load_ratio × mean, mean + load_margin_s) seconds of work."""
    expose_nodes: bool = False
    """Answer with x-skerry-prefill and x-skerry-decode."""
    simulate_round_trips: bool = False
    """Let edges wait `round_trip_ms` before each request: a world on one machine."""
    network_trusted: bool = False
    """Allow plaintext listeners on other than loopback addresses."""


class Limits(_Section, frozen=True):
    body_bytes: Positive = 8 << 20
    body_s: Seconds = 60.0
    """A body has to be complete within this."""
    head_s: Seconds = 20.0
    """A request's first line and headers have to be complete within this."""
    deadline_s: Seconds = 600.0
    queue: Positive = 256
    """Requests that may wait in one region before it refuses."""
    hold: Count = 256
    """Requests that an edge process may hold while every region refuses; 0 holds none."""
    hold_s: Seconds = 20.0
    """How long one of them may be held."""
    lease_s: Seconds = 30.0
    """A KV ticket without renewal is void after this."""
    heartbeat_s: Seconds = 1.0
    """Node to router; three missed ones and the node is lost."""


class EdgeTls(_Section, frozen=True):
    """Files in PEM, relative to the state folder; looked at again every few seconds, so that what
    renews them has nothing to restart."""

    certificate: str
    """The edge's own first, then those that lead to its authority."""
    key: str


class Edge(_Section, frozen=True):
    name: Name
    listen: str = "127.0.0.1:8787"
    place: str = ""
    round_trip_ms: dict[str, Amount] = {}
    """To each region; the nearest one is the smallest."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Processes on the one address."""
    origins: tuple[str, ...] = ()
    """Web pages from these origins ("https://example.org") may call this edge in a browser; "*"
    lets any. None by default: a page could else use what only this machine may."""
    admin: str | None = None
    """Where `skerry worker` comes in; without it this edge has no Workers."""
    tls: EdgeTls | None = None
    """Callers speak https with it."""
    ssh: str | None = None
    """The host that `skerry deploy --target ssh` puts it on: `USER@HOST`, or a name of the
    operator's SSH configuration."""

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"{'http' if self.tls is None else 'https'}://{self.listen}"


class Observe(_Section, frozen=True):
    otlp: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/]+")] | None = None
    """Base URL of an OpenTelemetry collector (OTLP over HTTP, port 4318 usually): every process
    sends it its spans of each request."""
    log: Form = "text"
    """How processes write their logs: lines for people, or an object of JSON each."""


class Ssh(_Section, frozen=True):
    """How `skerry deploy --target ssh` leaves things on the hosts that it is given."""

    folder: str = "/opt/skerry"
    """Releases, topologies, and the state folder below it; its user's own. Relative to the user's
    home."""
    python: str = "python3"
    """3.11 or 3.12 there, for the environment of each release."""
    config: str | None = None
    """A file of the operator's SSH configuration, relative to the topology file, instead of the
    usual one."""
    manager: Literal["auto", "system", "user"] = "auto"
    """Whose systemd keeps the processes; auto: the system's for root, else the user's own."""
    packages: Literal["own", "host"] = "own"
    """What a release consists of. host: only Skerry itself is put there, and what it needs is taken
    from the environment of `python`, as in an image with PyTorch for its GPU."""


class Tls(_Section, frozen=True):
    inside: bool = False
    """Edges, routers and nodes speak TLS with each other and show each other certificates."""
    folder: str = "certs"
    """Of the state folder: `ca.crt`, and `NAME.crt` and `NAME.key` of each process."""


class Topology(_Section, frozen=True):
    version: int
    models: dict[str, Model]
    edges: tuple[Edge, ...]
    regions: tuple[Region, ...]
    name: str = "skerry"
    secrets: Secrets = Secrets()
    routing: Routing = Routing()
    limits: Limits = Limits()
    residency: dict[str, tuple[str, ...]] = {}
    """Namespace → the regions that may see its prompts; one that is not here may use all."""
    access: Access = Access()
    tenants: dict[Name, Tenant] = {}
    budgets: Budgets = Budgets()
    workers: Workers = Workers()
    observe: Observe = Observe()
    tls: Tls = Tls()
    ssh: Ssh = Ssh()
    currency: str = "USD"

    def residency_of(self, namespace: str, model: str) -> frozenset[RegionName] | None:
        """The regions that a request may be sent to; None for all, empty for none."""
        sets = [
            frozenset(RegionName(name) for name in names)
            for names in (
                self.residency.get(namespace),
                self._resident(model),
                *(one.regions for name, one in self.tenants.items()
                  if one.regions and self.namespace_of(name) == namespace),
            )
            if names
        ]  # fmt: skip
        return frozenset.intersection(*sets) if sets else None

    def namespace_of(self, tenant: str) -> str:
        """Whose prefixes a tenant of `tenants` shares, or the anonymous one."""
        described = self.tenants.get(tenant)
        if described is not None and described.namespace is not None:
            return described.namespace
        return "" if tenant == ANONYMOUS else tenant

    def _resident(self, model: str) -> tuple[str, ...]:
        return self.models[model].residency if model in self.models else ()

    def edge(self, name: str) -> Edge:
        return _named("edge", self.edges, name)

    def region(self, name: str) -> Region:
        return _named("region", self.regions, name)

    def router(self, name: str) -> tuple[Region, Router]:
        """By the name of its process (`Region.doors`)."""
        doors = [(own, region, router) for region in self.regions for own, router in region.doors]
        for own, region, router in doors:
            if own == name:
                return region, router
        known = ", ".join(own for own, _, _ in doors)
        raise ConfigError(f"no router is named {name!r}; the topology has: {known}")

    def node(self, name: str) -> tuple[Region, Node]:
        pairs = [(region, node) for region in self.regions for node in region.nodes]
        for region, node in pairs:
            if node.name == name:
                return region, node
        known = ", ".join(node.name for _, node in pairs)
        raise ConfigError(f"no node is named {name!r}; the topology has: {known}")

    def canonical_model(self, name: str) -> ModelName | None:
        """The model that `name` (its own name or an alias) stands for."""
        if name in self.models:
            return ModelName(name)
        for canonical, model in self.models.items():
            if name in model.aliases:
                return ModelName(canonical)
        return None


@dataclass(frozen=True, slots=True)
class World:
    """A topology with what lies around it. `state` is the folder of secrets, logs and run files."""

    topology: Topology
    path: Path
    state: Path

    def secret(self, which: str) -> bytes:
        """The secret named `which` of `[secrets]`; a missing file is made, readable by us only, but
        for Redis's, which Redis knows already."""
        reference: str = getattr(self.topology.secrets, which)
        return read_secret(which, reference, self.state, make=which != "redis")

    def tier_folder(self, node: Node) -> Path | None:
        """Where a node keeps blocks on disk; None where it does not."""
        return None if node.disk_tier is None else self.state / node.disk_tier.path

    def model_source(self, name: str) -> str:
        """`source` of a model, with a relative path made absolute."""
        source = self.topology.models[name].source
        if source.startswith("package:") or Path(source).is_absolute():
            return source
        return str((self.path.parent / source).resolve())


def load(path: Path, *, state: Path) -> World:
    """Read and check a topology. Raises ConfigError."""
    return World(topology=parse(read(path), name=str(path)), path=path.resolve(), state=state)


def read(path: Path) -> str:
    """The text of a topology file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not TOML: byte {error.start} is not UTF-8") from error
    except ValueError as error:  # a NUL, which no path has
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def parse(text: str, *, name: str = "topology") -> Topology:
    """Check the text of a topology. `name` heads every complaint."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from error
    if raw.get("version") != VERSION:
        given = raw.get("version")
        what = "`version` is missing" if given is None else f"version is {given!r}"
        raise ConfigError(
            f"{name}:{line_of(text, ('version',))}: {what}; this release reads version {VERSION}"
        )
    for complaint in not_finite(raw):
        raise ConfigError(f"{name}:{line_of(text, complaint.path)}: {complaint.what}")
    try:
        topology = msgspec.convert(raw, Topology)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}:{explain(str(error), text, raw, Topology)}") from error
    for complaint in complaints(topology):
        raise ConfigError(f"{name}:{line_of(text, complaint.path)}: {complaint.what}")
    return topology


_T = TypeVar("_T", Edge, Region)


def _named(kind: str, items: tuple[_T, ...], name: str) -> _T:
    for item in items:
        if item.name == name:
            return item
    known = ", ".join(item.name for item in items)
    raise ConfigError(f"no {kind} is named {name!r}; the topology has: {known}")
