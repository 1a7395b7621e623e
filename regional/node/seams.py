"""What the parts of a front see of its neighbours: a rank, a session with a router, a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.engine.messages import Command
from core.kv.shards import PoolMemory
from core.kv.transports.base import Carrier
from regional.pb import node_pb2 as pb


class Rank(Protocol):
    """Takes commands: the link to the rank that schedules a pool, or a rank of the test's own."""

    def send(self, command: Command) -> None: ...


class Outbox(Protocol):
    """One session with a router. What is sent after its end is dropped."""

    def send(self, message: pb.NodeMessage) -> None: ...


@dataclass(frozen=True, slots=True)
class Sending:
    """What the errands of a pool share. `model` is a `core.kv.ticket.model_digest`."""

    rank: Rank
    memory: PoolMemory
    carrier: Carrier
    model: bytes
    clock: Callable[[], float]
