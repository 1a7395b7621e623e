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
from core.config_scale import Scale
from core.config_secrets import read_secret
from core.config_tenants import ANONYMOUS, Access, Budgets, Price, Tenant
from core.config_workers import Workers
from core.errors import ConfigError
from core.parallel import ModelNumbers, Plan
from core.types import BLOCK_TOKENS, ModelName, RegionName, Role

VERSION = 1

_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]


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
    depth: _Positive = 2
    """Blocks of 512 bytes of prompt text that make the route key."""
    short_prompt_bytes: _Count = 1024
    """A prompt below this is answered by the nearest region: reading it again is cheaper than
    travelling."""
    load_ratio: Annotated[float, msgspec.Meta(ge=1.0)] = 1.5
    load_margin_s: _Amount = 10.0
    """A region is full above max(load_ratio × mean, mean + load_margin_s) seconds of work."""
    expose_nodes: bool = False
    """Answer with x-skerry-prefill and x-skerry-decode."""
    simulate_round_trips: bool = False
    """Let edges wait `round_trip_ms` before each request: a world on one machine."""
    network_trusted: bool = False
    """Allow plaintext listeners on other than loopback addresses."""


class Limits(_Section, frozen=True):
    body_bytes: _Positive = 8 << 20
    body_s: _Seconds = 60.0
    """A body has to be complete within this."""
    head_s: _Seconds = 20.0
    """A request's first line and headers have to be complete within this."""
    deadline_s: _Seconds = 600.0
    queue: _Positive = 256
    """Requests that may wait in one region before it refuses."""
    hold: _Count = 256
    """Requests that an edge process may hold while every region refuses; 0 holds none."""
    hold_s: _Seconds = 20.0
    """How long one of them may be held."""
    lease_s: _Seconds = 30.0
    """A KV ticket without renewal is void after this."""
    heartbeat_s: _Seconds = 1.0
    """Node to router; three missed ones and the node is lost."""


class Scripted(_Section, frozen=True):
    step_ms: _Amount = 0.0
    prefill_tokens_per_s: _Amount = 0.0
    repeat: bool = False
    block_bytes: _Positive = 4096
    layers: _Positive = 1
    kv_heads: _Positive = 1
    """What plans can split: each layer and head has its share of a block."""

    @property
    def numbers(self) -> ModelNumbers:
        """As if it were a model."""
        many = 1 << 16
        return ModelNumbers(self.layers, 12 * self.kv_heads, self.kv_heads, many, many)


class Model(_Section, frozen=True):
    source: str
    """`package:NAME` (a Python package that carries one GGUF file) or a path to a GGUF file or a
    folder of safetensors; relative paths start at the topology file."""
    aliases: tuple[str, ...] = ()
    context: _Positive | None = None
    """Tokens of prompt and answer together; the model's own limit when absent."""
    engine: Literal["torch", "scripted"] = "torch"
    """torch, or scripted: no weights, plays the prompt back (rehearsals and fault tests)."""
    scripted: Scripted | None = None
    residency: tuple[str, ...] = ()
    """The regions that may see its prompts; all when empty."""
    price: Price | None = None


class Edge(_Section, frozen=True):
    name: _Name
    listen: str = "127.0.0.1:8787"
    place: str = ""
    round_trip_ms: dict[str, _Amount] = {}
    """To each region; the nearest one is the smallest."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Processes on the one address."""
    origins: tuple[str, ...] = ()
    """Web pages from these origins ("https://example.org") may call this edge in a browser; "*"
    lets any. None by default: a page could else use what only this machine may."""
    admin: str | None = None
    """Where `skerry worker` comes in; without it this edge has no Workers."""


class DiskTier(_Section, frozen=True):
    """What two requests have used of a node's KV cache stays on disk, encrypted, over restarts."""

    bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 2 << 30
    """The file never grows beyond it."""
    path: str = "tiers"
    """A folder; relative to the state folder."""


class Node(_Section, frozen=True):
    name: _Name
    role: Role
    model: str
    host: str = "127.0.0.1"
    """Where the KV data socket listens; its port is chosen by the system and told in tickets."""
    transports: tuple[Literal["shared_memory", "tcp", "mooncake"], ...] = ("shared_memory", "tcp")
    """How KV may reach this node and leave it, the preferred way first. A transfer goes the first
    way of its sender that its receiver lists too; shared memory joins processes of one host."""
    threads: _Positive = 1
    kv_tokens: Annotated[int, msgspec.Meta(ge=2 * BLOCK_TOKENS)] = 16384
    max_sequences: _Positive = 32
    max_step_tokens: _Positive = 512
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the CPU: a GPU is used where one asks for it."""
    gpus: tuple[_Count, ...] = ()
    """With device "cuda": which of each host's CUDA devices its ranks take, one each, in order; the
    first ones when absent. Two nodes on one machine must not name the same."""
    parallel: Plan = Plan()
    """How the model is split over processes; one process when absent."""
    disk_tier: DiskTier | None = None
    """None when absent: whether prompts may leave a trace on a disk is for the operator to say."""
    host_tier_bytes: _Count = 0
    """Of host memory beside the pool, for the same blocks: for nodes that compute on a device."""
    speculate: bool = True
    """Guess what repeats and check several tokens in one pass, where that is faster. The text is
    the same either way."""


class Router(_Section, frozen=True):
    http: str = "127.0.0.1:0"
    grpc: str = "127.0.0.1:0"


class Region(_Section, frozen=True):
    name: _Name
    nodes: tuple[Node, ...]
    http: str = "127.0.0.1:0"
    """Where edges come in; port 0 lets `skerry up` choose a free one."""
    grpc: str = "127.0.0.1:0"
    """Where this region's nodes come in."""
    place: str = ""
    weight: _Positive = 100
    split_min_tokens: _Count = 256
    """A remainder of a prompt below this is read by the decode node itself, whatever the measured
    rates say; 0 leaves it to them."""
    routers: tuple[Router, ...] = ()
    """Further routers beside the one at `http` and `grpc`: nodes join all, edges use all."""
    scale: dict[str, Scale] = {}
    """By model: how many of its nodes run. All do, always, where it is not named."""

    @property
    def doors(self) -> tuple[tuple[str, Router], ...]:
        """All of its routers by the names of their processes: the region's own, then NAME.2 …"""
        further = ((f"{self.name}.{n}", one) for n, one in enumerate(self.routers, start=2))
        return (self.name, Router(self.http, self.grpc)), *further


class Observe(_Section, frozen=True):
    otlp: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/]+")] | None = None
    """Base URL of an OpenTelemetry collector (OTLP over HTTP, port 4318 usually): edges send it the
    spans of every request."""


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
    tenants: dict[_Name, Tenant] = {}
    budgets: Budgets = Budgets()
    workers: Workers = Workers()
    observe: Observe = Observe()
    tls: Tls = Tls()
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
