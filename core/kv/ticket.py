"""A ticket: the right to hand KV into reserved blocks, as plain data, and its credentials."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

TICKET_ID_BYTES = 16
MODEL_DIGEST_BYTES = 16


class PieceKey(NamedTuple):
    """One block of one endpoint; `block` counts the prompt's blocks."""

    rank: int
    group: int
    block: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A way in which a receiver can be served. `host` says on what machine `address` means
    something, where it does not mean the same everywhere."""

    kind: str
    address: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What one rank wants of one KV group. `blocks`: indices of the prompt's missing blocks.

    `address` is the data socket; whoever gives no `offers` can only be reached there, over TCP.
    """

    rank: int
    address: str
    group: int
    layers: int
    heads: int
    dtype: str
    block_bytes: int
    blocks: tuple[int, ...]
    first_layer: int = 0
    first_head: int = 0
    offers: tuple[Offer, ...] = ()

    def pieces(self) -> Iterable[PieceKey]:
        return (PieceKey(self.rank, self.group, index) for index in self.blocks)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to hand KV into reserved blocks, once, while the lease lasts.

    `id` is hexadecimal and is the credential of the data socket: it never appears in a log.
    `named`: whom the certificate of a data socket names, where that is not the address that is
    dialled: all hosts of a node show the one of its first. Never on the wire.
    """

    id: str
    generation: int
    lease_s: float
    endpoints: tuple[Endpoint, ...]
    named: str = ""

    @property
    def empty(self) -> bool:
        """No block is missing: nothing has to be sent."""
        return not any(endpoint.blocks for endpoint in self.endpoints)


def new_ticket_id() -> str:
    return secrets.token_hex(TICKET_ID_BYTES)


def model_digest(fingerprint: bytes) -> bytes:
    """What both halves of a transfer know their model by, in a fixed size."""
    return blake2b(fingerprint, digest_size=MODEL_DIGEST_BYTES, person=b"skerry-handoff").digest()
