"""What a region tells its edges about itself, at most ten times a second.

Frames of core.framing on `GET /internal/v1/status`. (epoch, sequence) orders them: a new epoch is
a restarted router, and whatever was known before is void.
"""

from __future__ import annotations

import msgspec

from core.digest import Filter
from core.framing import FrameDecoder
from core.types import ModelName, NodeName, RegionName, Role

STALE_S = 3.0
"""A region that has said nothing for this long is suspect and used last."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that the region can serve now."""

    name: ModelName
    context: int
    prefill_tokens_per_s: float = 0.0
    """Summed over the nodes that read prompts."""
    decode_tokens_per_s: float = 0.0
    """Of one sequence on one node."""


class RankStatus(msgspec.Struct, frozen=True):
    """One process that computes; `part`: the layers and KV heads that it holds."""

    rank: int
    pid: int
    part: str


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node as its router sees it. Counters run since the node's start."""

    name: NodeName
    role: Role
    model: ModelName
    pid: int = 0
    alive: bool = True
    draining: bool = False
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    prefill_backlog_tokens: int = 0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    rank_bytes_sent: int = 0
    """By its ranks to each other, to compute, and what its plan needs at the least."""
    rank_bytes_least: int = 0
    pipeline_bubble: float = 0.0
    """The share of its stages' time in which they stood still although there was work."""
    stage_seconds: tuple[float, ...] = ()
    plan: str = ""
    """How its model is split, as `core.parallel.Plan` writes it."""
    ranks: tuple[RankStatus, ...] = ()


class RegionStatus(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="status", tag_field="kind"
):
    """One status frame. Work is in seconds: what is in flight ÷ the measured rate."""

    region: RegionName
    epoch: str
    sequence: int
    models: tuple[ModelStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    prefill_work_s: float = 0.0
    decode_work_s: float = 0.0
    queue_s: float = 0.0
    """How long a request that comes now would wait before it is placed."""
    queued: int = 0
    active: int = 0
    """Requests accepted and not ended."""
    kv_used: float = 0.0
    """Share of KV blocks held by sequences, of the fullest decode pool."""
    draining: bool = False
    release: str = ""
    prompt_tokens: int = 0
    """Of requests that were answered, since the router's start; the four below are parts of it."""
    reusable_tokens: int = 0
    """Held by some node of the region when the request was placed."""
    routed_tokens: int = 0
    """Held by the pool that was to read it."""
    pulled_tokens: int = 0
    """Meant to be fetched for it from another pool."""
    delivered_tokens: int = 0
    """Computed by nobody for that request."""


class RegionPrefixes(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prefixes", tag_field="kind"
):
    """What a region knows of prompt beginnings: how often it was asked for them, and which it has.

    Comes on the status stream, only when it changed; an edge that does not know the kind skips it.
    Ids are `core.prefix.ID_BYTES` long. `filter` stands for what was held at `base`, and comes
    with the first frame of a stream and whenever `base` is new; `added` are the ids since then,
    joined. `hot` are joined ids with their `counts`, of `total` requests in the same window; a
    `total` of 0 says nothing of them: the last that was told stands.
    """

    region: RegionName
    epoch: str
    version: int
    base: int = 0
    filter: Filter | None = None
    added: bytes = b""
    hot: bytes = b""
    counts: tuple[float, ...] = ()
    total: float = 0.0


Told = RegionStatus | RegionPrefixes
"""Whatever a region says on its status stream."""


def status_decoder() -> FrameDecoder[Told]:
    """A decoder for one status stream."""
    return FrameDecoder[Told](Told)


def as_json(status: RegionStatus) -> bytes:
    """For people and scripts: every field is there, also one that holds its default, which the
    frames leave out."""
    return msgspec.json.encode(_spelled_out(status))


def _spelled_out(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return {name: _spelled_out(one) for name, one in msgspec.structs.asdict(value).items()}
    return [_spelled_out(one) for one in value] if isinstance(value, tuple) else value
