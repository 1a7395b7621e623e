"""What a front and its outposts say to each other, over TCP, framed by core.framing.

::

    outpost   Present, once its ranks serve     Expecting, Settled, Withdrawn     Overwritten
              Lost     Beat
    front     Expect     Take     Withdraw      Overwrite     Stop     Beat
"""

from __future__ import annotations

import msgspec

from core.engine.messages import Ready
from core.kv.ticket import Offer

BEAT_S = 0.5
SILENT_S = 3.0
"""Who has said nothing for this long is gone."""


class Rank(msgspec.Struct, frozen=True):
    """A rank that serves."""

    rank: int
    pid: int
    ready: Ready


class Present(msgspec.Struct, frozen=True, kw_only=True, tag="present", tag_field="kind"):
    """Always first. `address`: of the data socket there."""

    host: int
    secret: str
    address: str
    ranks: tuple[Rank, ...]
    offers: tuple[Offer, ...] = ()


class Expecting(msgspec.Struct, frozen=True, tag="expecting", tag_field="kind"):
    generation: int


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag="settled", tag_field="kind"):
    """A share is ready, or has failed: `failure` is of core.kv.handoff."""

    generation: int
    failure: str | None = None
    computed_tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn", tag_field="kind"):
    """Nothing writes into those blocks any more."""

    generation: int


class Overwritten(msgspec.Struct, frozen=True, tag="overwritten", tag_field="kind"):
    """The blocks of the oldest Overwrite that has not been answered."""

    pool: int


class Lost(msgspec.Struct, frozen=True, tag="lost", tag_field="kind"):
    """A rank there has ended; the outpost goes too."""

    message: str


class Beat(msgspec.Struct, frozen=True, tag="beat", tag_field="kind"):
    pass


class Expect(msgspec.Struct, frozen=True, kw_only=True, tag="expect", tag_field="kind"):
    """Receive what this host's ranks want of a transfer: `fill` is that of the leader's
    `Reserved`."""

    pool: int
    ticket_id: str
    generation: int
    lease_s: float
    fill: tuple[dict[int, int], ...]


class Take(msgspec.Struct, frozen=True, tag="take", tag_field="kind"):
    """The whole transfer is ready: the blocks belong to the rank."""

    generation: int


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw", tag_field="kind"):
    generation: int


class Stop(msgspec.Struct, frozen=True, tag="stop", tag_field="kind"):
    """The node closes on purpose."""


class Overwrite(msgspec.Struct, frozen=True, tag="overwrite", tag_field="kind"):
    """With zeros, in the memory of this host's ranks; answered by Overwritten."""

    pool: int
    blocks: tuple[tuple[int, ...], ...]


OutpostMessage = Present | Expecting | Settled | Withdrawn | Overwritten | Lost | Beat
FrontMessage = Expect | Take | Withdraw | Overwrite | Stop | Beat
