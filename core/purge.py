"""What `skerry purge` asks of a region and what it is told: JSON of `POST /internal/v1/purge`."""

from __future__ import annotations

import msgspec

PURGE_PATH = "/internal/v1/purge"


class PurgeAsk(msgspec.Struct, frozen=True):
    namespace: str


class NodePurged(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of KV that a node had of the namespace, by where. `error`: what was not done."""

    node: str
    error: str = ""
    requests: int = 0
    cached_blocks: int = 0
    scrubbed_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0


class RegionPurged(msgspec.Struct, frozen=True, kw_only=True):
    """`batches`: queued requests and kept answers that were deleted, by batch."""

    batches: int
    requests: int
    nodes: tuple[NodePurged, ...] = ()


class SlabPurged(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    blocks: int = 0
    error: str = ""


class FilesPurged(msgspec.Struct, frozen=True, kw_only=True):
    """What lay in a state folder. A slab that a node has open is left out: the node does it."""

    slabs: tuple[SlabPurged, ...]
    in_use: int
    batches: int
