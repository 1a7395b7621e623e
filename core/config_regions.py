"""The part of a topology that says what a region is made of: routers and nodes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from core.config_scale import Scale
from core.config_types import Count, Name, Positive, Seconds
from core.parallel import Plan
from core.types import BLOCK_TOKENS, Role


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class DiskTier(_Section, frozen=True):
    """What two requests have used of a node's KV cache stays on disk, encrypted, over restarts."""

    bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 2 << 30
    """The file never grows beyond it."""
    path: str = "tiers"
    """A folder; relative to the state folder."""


class Node(_Section, frozen=True):
    name: Name
    role: Role
    model: str
    host: str = "127.0.0.1"
    """Where the KV data socket listens; its port is chosen by the system and told in tickets."""
    transports: tuple[Literal["shared_memory", "tcp", "mooncake"], ...] = ("shared_memory", "tcp")
    """How KV may reach this node and leave it, the preferred way first. A transfer goes the first
    way of its sender that its receiver lists too; shared memory joins processes of one host."""
    threads: Positive = 1
    kv_tokens: Annotated[int, msgspec.Meta(ge=2 * BLOCK_TOKENS)] = 16384
    max_sequences: Positive = 32
    max_step_tokens: Positive = 512
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is the CPU: a GPU is used where one asks for it."""
    gpus: tuple[Count, ...] = ()
    """With device "cuda": which of each host's CUDA devices its ranks take, one each, in order; the
    first ones when absent. Two nodes on one machine must not name the same."""
    parallel: Plan = Plan()
    """How the model is split over processes; one process when absent."""
    disk_tier: DiskTier | None = None
    """None when absent: whether prompts may leave a trace on a disk is for the operator to say."""
    host_tier_bytes: Count = 0
    """Of host memory beside the pool, for the same blocks: for nodes that compute on a device."""
    pool: Name | None = None
    """Of the region's `pools`: which nodes it shares its place with."""
    ssh: str | None = None
    """Its host for `skerry deploy --target ssh`; the region's when absent."""
    speculate: bool = True
    """Guess what repeats and check several tokens in one pass, where that is faster. The text is
    the same either way."""


class Pool(_Section, frozen=True):
    """Room for fewer nodes than the topology lists in it: those whose models are asked for run, and
    what nobody uses gives way to what somebody waits for. All of their models are scaled."""

    places: Positive = 1
    """Nodes of it that may run at once."""
    turn_s: Seconds = 30.0
    """Where all are busy and somebody waits for another model: the one that has had its place
    longest, and for so long at the least, takes nothing new and goes when it has answered."""


class Router(_Section, frozen=True):
    http: str = "127.0.0.1:0"
    grpc: str = "127.0.0.1:0"


class Region(_Section, frozen=True):
    name: Name
    nodes: tuple[Node, ...]
    http: str = "127.0.0.1:0"
    """Where edges come in; port 0 lets `skerry up` choose a free one."""
    grpc: str = "127.0.0.1:0"
    """Where this region's nodes come in."""
    place: str = ""
    weight: Positive = 100
    split_min_tokens: Count = 256
    """A remainder of a prompt below this is read by the decode node itself, whatever the measured
    rates say; 0 leaves it to them."""
    routers: tuple[Router, ...] = ()
    """Further routers beside the one at `http` and `grpc`: nodes join all, edges use all."""
    pools: dict[Name, Pool] = {}
    ssh: str | None = None
    """The host of its routers, and of its nodes, for `skerry deploy --target ssh`: `USER@HOST`, or
    a name of the operator's SSH configuration."""
    scale: dict[str, Scale] = {}
    """By model: how many of its nodes run. All do, always, where it is not named."""

    @property
    def doors(self) -> tuple[tuple[str, Router], ...]:
        """All of its routers by the names of their processes: the region's own, then NAME.2 …"""
        further = ((f"{self.name}.{n}", one) for n, one in enumerate(self.routers, start=2))
        return (self.name, Router(self.http, self.grpc)), *further
