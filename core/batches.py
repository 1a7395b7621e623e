"""What an edge and a region tell one another about queued requests, and the id of a batch.

The edge parses, the region keeps and runs, the edge renders: a region knows nothing of dialects,
so each item carries a `note` that comes back with its answer.

What a request used is owed to the ledger that charged it, named by `Submission.collector`: the
region keeps it until that ledger's edge says that it is written down, polled for or not.

The id names the region that holds the batch. It is signed for a namespace with the fleet's secret:
who alters it, or has it from another tenant, gets no further than the edge, which answers as for a
batch that does not exist.
"""

from __future__ import annotations

import hmac
import re

import msgspec

from core.events import Fault
from core.types import GenerateRequest, ModelName, RegionName, Usage

QUEUE_PRIORITY = 100
"""Of queued requests: after everybody who waits for an answer."""
KEEP_S = 24 * 3600.0
"""How long results are kept once a batch is done, and how long a request may be queued."""
NONCE_BYTES = 16
QUEUE_PATH = "/internal/v1/queue"
_MAC_BYTES = 12
_ID = re.compile(r"([a-z0-9][a-z0-9-]{0,62})\.([0-9a-f]{32})\.([0-9a-f]{24})")


class QueuedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch. `note` and `account` belong to the edge: the one comes back with the
    answer, the other with the usage."""

    request: GenerateRequest
    note: bytes = b""
    account: bytes = b""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /internal/v1/queue`. The same id again is the same batch."""

    id: str
    namespace: str
    model: ModelName
    items: tuple[QueuedItem, ...]
    collector: str = ""
    """The ledger that the usage is owed to."""


class ItemAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an item. `events`: frames of core.events, the deltas of it joined, with a
    `Done` or a `Fault` at the end."""

    request_id: str
    note: bytes
    events: bytes


class BatchState(msgspec.Struct, frozen=True, kw_only=True, tag="batch", tag_field="kind"):
    """`status`: queued, running or done; answers come when all are there, in their order.

    `told`: the usage of all of them is written down.
    """

    status: str
    model: ModelName
    answers: tuple[ItemAnswer, ...] = ()
    told: bool = False


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """What one queued request used, not yet written down. `outcome`: "ok" or an error's code."""

    request_id: str
    account: bytes
    model: ModelName
    outcome: str
    usage: Usage


class OwedPage(msgspec.Struct, frozen=True, kw_only=True, tag="owed", tag_field="kind"):
    """`GET /internal/v1/owed?collector=NAME`. Some of it: more comes once this is written down."""

    items: tuple[Owed, ...] = ()


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written", tag_field="kind"):
    """`POST /internal/v1/owed?collector=NAME`: these are in that ledger. The answer names those of
    them that were owed until now, so that what follows from it is done once."""

    request_ids: tuple[str, ...] = ()


class QueueLeft(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /internal/v1/queue`, as JSON: what a router still has. `waiting`: requests without an
    answer; `owed`: usage that no ledger has; `kept`: batches that may be asked for."""

    waiting: int = 0
    owed: int = 0
    kept: int = 0


QueueReply = BatchState | OwedPage | Written | Fault


def batch_id(region: RegionName, nonce: bytes, *, fleet_key: bytes, namespace: str) -> str:
    """An id that leads to `region`; `nonce` is NONCE_BYTES of randomness."""
    name = f"{region}.{nonce.hex()}"
    return f"{name}.{_mac(name, fleet_key, namespace)}"


def region_of(batch: str, *, fleet_key: bytes, namespace: str) -> RegionName | None:
    """The region that holds `batch`; None where the id was not made for this namespace."""
    match = _ID.fullmatch(batch)
    if match is None:
        return None
    region, nonce, mac = match.groups()
    if not hmac.compare_digest(mac, _mac(f"{region}.{nonce}", fleet_key, namespace)):
        return None
    return RegionName(region)


def _mac(name: str, fleet_key: bytes, namespace: str) -> str:
    text = b"skerry-batch-1\0" + namespace.encode() + b"\0" + name.encode()
    return hmac.digest(fleet_key, text, "sha256")[:_MAC_BYTES].hex()
