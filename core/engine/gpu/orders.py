"""What the leader of a pool tells its followers on their devices, and what they answer.

Whatever is given to a device is given on all ranks in the same order, and that order is the
leader's: also which graph a step uses, and when one is captured, for a graph holds its part of the
sums that all ranks must make together.
"""

from __future__ import annotations

import msgspec

from core.engine.lead import Counts


class Compute(msgspec.Struct, frozen=True, tag="compute", array_like=True):
    """`plan` as `plan_wire` writes it; `graph`: the size of the one to be used, 0: none."""

    plan: bytes
    graph: int = 0


class Capture(msgspec.Struct, frozen=True, tag="capture", array_like=True):
    """A graph for decode steps of `size` rows; answered by `Captured`."""

    size: int


class Arrive(msgspec.Struct, frozen=True, tag="arrive", array_like=True):
    """Blocks of each KV group were filled in the memory of every rank's front."""

    groups: tuple[tuple[int, ...], ...]


Order = Compute | Capture | Arrive


class Landed(msgspec.Struct, frozen=True, tag="landed", array_like=True):
    """Everything of the step `number` has happened on the device, copies for others included.
    `result`, as `plan_wire` writes it, from one rank of the last stage."""

    number: int
    counts: Counts
    result: bytes | None = None


class Captured(msgspec.Struct, frozen=True, tag="captured", array_like=True):
    size: int
    good: bool


Answer = Landed | Captured

encode = msgspec.msgpack.encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
