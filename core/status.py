"""What a region tells its edges about itself, at most ten times a second.

Frames of core.framing on `GET /internal/v1/status`. (epoch, sequence) orders them: a new epoch is
a restarted router, and whatever was known before is void.
"""

from __future__ import annotations

import msgspec

from core.digest import Filter
from core.framing import FrameDecoder
from core.types import ModelName, NodeName, RegionName

STALE_S = 3.0
"""A region that has said nothing for this long is suspect and used last."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that the region can serve, now or once a node of it has been started."""

    name: ModelName
    context: int
    prefill_tokens_per_s: float = 0.0
    """Summed over the nodes that read prompts."""
    decode_tokens_per_s: float = 0.0
    """Of one sequence on one node."""
    start_s: float = 0.0
    """More than 0: cold, no node that can answer is up; about so long until one is."""


class RankStatus(msgspec.Struct, frozen=True):
    """One process that computes; `part`: the layers and KV heads that it holds."""

    rank: int
    pid: int
    part: str


class TierStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node keeps of its KV below its pools' memory. Counters are blocks since its start."""

    kind: str
    """host or disk."""
    off: str = ""
    """Why it is not used any more."""
    blocks: int = 0
    places: int = 0
    written: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    """Not kept: the disk was behind, or had no place for another namespace."""
    damaged: int = 0
    foreign: int = 0
    """Found at the start and left out: of another model, key or version."""
    failed: int = 0
    """Reads and writes that the system refused."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One node as its router sees it. Counters run since the node's start."""

    name: NodeName
    role: str
    """A value of core.types.Role, or one that only a newer peer knows."""
    model: ModelName
    pid: int = 0
    alive: bool = True
    off: bool = False
    """Not alive, and not meant to be now."""
    draining: bool = False
    pool: str = ""
    """Of the topology: what it shares its place with."""
    placed: int = 0
    """Prompts that it was given to read and sequences to decode; told of nodes in a pool."""
    idle_s: float = 0.0
    """Since the last of them ended; told of nodes in a pool."""
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
    release: str = ""
    ranks: tuple[RankStatus, ...] = ()
    tiers: tuple[TierStatus, ...] = ()


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of requests that were answered, since the router's start: each once, by the attempt that
    answered it."""

    all: int = 0
    reusable: int = 0
    """Held by some pool of the region when the request was placed."""
    routed: int = 0
    """Held by the pool that was to read it."""
    pulled: int = 0
    """Meant to be fetched for it from another pool."""
    delivered: int = 0
    """Computed by nobody for that request."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many nodes of a model and role should run now, and why."""

    model: ModelName
    role: str
    nodes: int = 0
    why: str = ""
    waiting: int = 0
    """Requests for the model that have no place."""
    waiting_s: float = 0.0
    """How long the first of them has waited."""
    in_use: bool = False
    """Some request for the model has come and has not ended."""
    no_place: bool = False
    """Others have all places that a node which answers for the model could take."""


class RegionMore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came to the frame later, in one field: with more than fifteen its map would have another
    head."""

    prompts: PromptTokens = PromptTokens()
    weight: int = 0
    """On the edges' rings, by order of the operator; 0: as the topology has it."""
    wanted: tuple[Wanted, ...] = ()
    """Of the models that are scaled; empty while a router that has just started looks around."""


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
    more: RegionMore = RegionMore()


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
    router: int = 0
    """Which of the region's routers says so: each speaks of what it has read itself. Set by the
    edge that hears them."""


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
