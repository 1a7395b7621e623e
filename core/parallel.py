"""The parallel plan of a node: how many ranks it has, which part of the model each one holds, and
why a model does not divide that way. Plain numbers; nothing is read, nothing is computed here.

Ranks are numbered by stage, then data-parallel rank, then tensor-parallel rank. Experts are spread
over the ranks of one stage, so `ep` divides their number and adds none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

_Degree = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Place(NamedTuple):
    """Where a rank stands in its node's plan."""

    stage: int
    dp_rank: int
    tp_rank: int


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tp × pp × dp_attention processes; `[regions.nodes.parallel]` of a topology."""

    tp: _Degree = 1
    """Ranks that share each layer's heads and columns."""
    pp: _Degree = 1
    """Stages of consecutive layers."""
    ep: _Degree = 1
    """Groups that the experts of a layer are spread over, among the ranks of a stage."""
    dp_attention: _Degree = 1
    """Groups with attention and a KV pool of their own, which share the rest of each layer."""

    @property
    def ranks(self) -> int:
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        return self.tp * self.dp_attention

    def place(self, rank: int) -> Place:
        rest, tp_rank = divmod(rank, self.tp)
        stage, dp_rank = divmod(rest, self.dp_attention)
        return Place(stage, dp_rank, tp_rank)

    def rank(self, place: Place) -> int:
        return (place.stage * self.dp_attention + place.dp_rank) * self.tp + place.tp_rank

    def leader(self, dp_rank: int) -> int:
        """The rank that schedules a pool: the first of its first stage."""
        return self.rank(Place(0, dp_rank, 0))

    def members(self, dp_rank: int) -> tuple[int, ...]:
        """The ranks that hold a pool together, the leader first."""
        return tuple(r for r in range(self.ranks) if self.place(r).dp_rank == dp_rank)

    def __str__(self) -> str:
        """`tp 3 × pp 2`; `1 rank` when nothing is split."""
        degrees = (
            ("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("dp_attention", self.dp_attention)
        )  # fmt: skip
        return " × ".join(f"{name} {n}" for name, n in degrees if n > 1) or "1 rank"


class Hosts(msgspec.Struct, frozen=True):
    """The machines that one node's ranks are spread over, in equal shares: this one is `index`.

    From the usual variables of a rendezvous: MASTER_ADDR, MASTER_PORT, RANK (of this host),
    WORLD_SIZE (of hosts).
    """

    index: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    """Of the first one."""
    port: int = 0
    """0: there is one host, any port will do."""
    secret: str = ""
    """What ranks know each other by; made up where there is one host."""

    def ranks(self, plan: Plan) -> range:
        """Those that run here."""
        share = plan.ranks // self.count
        return range(self.index * share, (self.index + 1) * share)


ONE_HOST = Hosts()


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """What divides, or does not. `latent`: the KV has no heads, each rank of a TP group has all of
    it; `experts` 0: the model is dense."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int
    experts: int = 0
    latent: bool = False


def refusal(plan: Plan, numbers: ModelNumbers | None = None) -> str | None:
    """Why this plan cannot be, in one line with the numbers; without a model, what is wrong with it
    whatever the model."""
    return next(_complaints(plan, numbers), None)


def kv_slice(numbers: ModelNumbers, plan: Plan, tp_rank: int) -> tuple[int, int]:
    """First KV head of a TP rank, and how many it holds. Where there are more ranks than heads,
    neighbours hold copies of one."""
    if numbers.latent:
        return 0, numbers.kv_heads
    if plan.tp > numbers.kv_heads:
        return tp_rank * numbers.kv_heads // plan.tp, 1
    share = numbers.kv_heads // plan.tp
    return tp_rank * share, share


def _complaints(plan: Plan, numbers: ModelNumbers | None) -> Iterator[str]:
    if plan.stage_ranks % plan.ep:
        yield (
            f"ep {plan.ep} does not divide the ranks of a stage, which are {plan.stage_ranks}"
            f" (tp {plan.tp} × dp_attention {plan.dp_attention})"
        )
    if numbers is None:
        return
    tp = plan.tp
    if numbers.heads % tp or not _kv_divides(numbers, tp):
        fitting = [
            str(n)
            for n in range(1, numbers.heads + 1)
            if numbers.heads % n == 0 and _kv_divides(numbers, n)
        ]
        kv = "" if numbers.latent else f" and {numbers.kv_heads} KV"
        yield (
            f"tp {tp} does not divide {numbers.heads} query{kv} heads;"
            f" these do: {', '.join(fitting)}"
        )
    for what, count in (("columns of the MLP", numbers.intermediate),
                        ("rows of the vocabulary", numbers.vocab_size)):  # fmt: skip
        if count < tp:
            yield f"tp {tp} is more than the {count} {what}"
    if plan.pp > numbers.layers:
        yield f"pp {plan.pp} is more than the {numbers.layers} layers"
    if plan.ep > 1 and not numbers.experts:
        yield f"ep {plan.ep} needs experts, and the model has none"
    elif numbers.experts % plan.ep:
        yield f"ep {plan.ep} does not divide {numbers.experts} experts"


def _kv_divides(numbers: ModelNumbers, tp: int) -> bool:
    if numbers.latent:
        return True
    return numbers.kv_heads % tp == 0 if tp <= numbers.kv_heads else tp % numbers.kv_heads == 0
