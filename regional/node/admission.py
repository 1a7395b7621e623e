"""Whether a router's work can be taken here, and what it is for the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.engine.messages import SequenceSpec
from core.errors import Draining, InternalError
from regional.node import wire
from regional.node.pool import Pool
from regional.node.resolve import sequence_specs
from regional.pb import node_pb2 as pb


@dataclass(frozen=True, slots=True)
class Admitted:
    """`specs`: one for each choice."""

    work: wire.Work
    specs: tuple[SequenceSpec, ...]
    pool: Pool


class Admission:
    """`context` and `vocab_size` are what text model and ranks agree upon. `draining`: nothing new
    is taken."""

    def __init__(
        self, pools: Sequence[Pool], *, context: int, vocab_size: int, end_ids: frozenset[int]
    ) -> None:
        self.draining = False
        self.pools = tuple(pools)
        self._context = context
        self._vocab_size = vocab_size
        self._end_ids = end_ids

    def take(self, message: pb.Work, pool: int) -> Admitted:
        """Raises RequestError."""
        if self.draining:
            raise Draining("the node takes no new work")
        if pool >= len(self.pools):
            raise InternalError(f"pool {pool} is not among the {len(self.pools)} of this node")
        work = wire.work(message)
        specs = sequence_specs(
            work.request,
            work.token_ids,
            context=self._context,
            vocab_size=self._vocab_size,
            end_ids=self._end_ids,
            deadline_s=work.deadline_s,
            move_min_tokens=work.move_min_tokens,
        )
        return Admitted(work, specs, self.pools[pool])
