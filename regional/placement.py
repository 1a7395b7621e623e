"""Which pools read and answer a prompt. Pure: a view of the cluster in, a decision out.

The decode node comes first: the one whose cache spares most, weighed against the work that it
holds. Then the prompt is split off to a prefill node where that pays by what the nodes have
measured (`costs`), or the decode node reads it itself; either may first pull blocks from a third
pool. Whatever cannot be placed now but can later is a `Wait`; what no node could ever take raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import nlargest

from core.errors import ContextLengthExceeded, RegionUnavailable
from core.types import BLOCK_TOKENS, ModelName, PoolId, Role
from regional import costs
from regional.cluster import ClusterView, NodeView, Offer
from regional.costs import NOTHING, PullPlan, Reading
from regional.kv_index import Held

CHUNKS_OF_BACKLOG = 2
"""A prefill node takes another prompt while its backlog stays within so many of its steps."""
LOAD_RATIO = 1.25
LOAD_MARGIN = 2.0
"""A decode node above max(ratio × mean, mean + margin) sequences gets no more for its cache."""
TYPICAL_ANSWER_TOKENS = 256
PULL_SOURCES = 4
"""Pools that are weighed as sources of a pull: those that hold most."""

Site = tuple[NodeView, Offer]
"""A pool and the model that it is asked for."""


class Reason(StrEnum):
    """Why a request went where it went: all but the first leave the prompt to the decode node."""

    SPLIT = "split"
    SHORT_REMAINDER = "short_remainder"
    """Below the region's `split_min_tokens`."""
    CACHED_ON_DECODE = "cached_on_decode"
    """The decode node holds more of it than any prefill node; the rest is not worth a hand-off."""
    NO_GAIN = "split_does_not_pay"
    """By the measured rates."""
    COMBINED = "combined"
    NO_PREFILL_NODE = "no_prefill_node"
    PREFILL_BUSY = "prefill_busy"
    ONE_TOKEN = "one_token"
    RECOMPUTE = "recompute"
    """A hand-off failed before."""


class Scarce(StrEnum):
    """What a waiting request waits for."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLD = "cold"
    """A node of the model has to be started first."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed. `excluded` are sessions that lost or failed this request, `refused`
    the pools (`NodeView.key`) that had no room for it, with their `changes` at that time."""

    model: ModelName
    prompt_tokens: int
    max_tokens: int | None
    choices: int = 1
    """Sequences that decode it, of one prompt."""
    recompute: bool = False
    """A hand-off failed: the decode node reads the prompt itself."""
    may_pull: bool = False
    excluded: frozenset[int] = frozenset()
    refused: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def prefix_tokens(self) -> int:
        """What prefill makes: all but the last prompt token, which decode computes."""
        return self.prompt_tokens - 1

    @property
    def answer_tokens(self) -> int:
        return expected_tokens(self.max_tokens, self.choices)

    @property
    def least_tokens(self) -> int:
        """KV that the request needs at the least to give its whole answer."""
        return self.prompt_tokens + (self.max_tokens or 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """`compute_tokens` is what the reading node has to compute, `cached_tokens` what it holds; the
    rest comes by `pull`. `alone_s` and `split_s`: what both ways were thought to cost, where both
    were weighed."""

    prefill: PoolId | None
    decode: PoolId
    reason: Reason
    compute_tokens: int
    cached_tokens: int
    pull: PullPlan | None = None
    alone_s: float | None = None
    split_s: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    scarce: Scarce


def place(
    view: ClusterView, held: Mapping[PoolId, Held], ask: Ask, *, split_min_tokens: int
) -> Placement | Wait:
    """Decide. `held` gives blocks of the first n−1 tokens that a pool holds.

    Raises RegionUnavailable when no node that could take it may be asked now, ContextLengthExceeded
    when no node of the region has a pool that is large enough.
    """
    serving = [
        (node, offer)
        for node in view.nodes
        if not node.draining
        and node.serial not in ask.excluded
        and (offer := node.offer(ask.model)) is not None
    ]
    if ask.model in view.startable and not any(view.answering(ask.model)):
        return Wait(Scarce.COLD)
    decoders = _decoders(view, serving, ask)
    free = [pair for pair in decoders if _has_slot(pair[0], ask)]
    if not free:
        return Wait(Scarce.DECODE)
    readings = _Readings(serving, held, ask)
    mean = sum(costs.sequences(node) for node, _ in free) / len(free)
    decode = min(free, key=lambda site: _decode_cost(site, readings.of(site), mean))
    node, offer = decode
    own = readings.of(decode)
    itself = _reads_itself(ask.prefix_tokens - own.held_tokens, ask, split_min_tokens)
    if itself is not None:
        return _direct(node, itself, own)
    readers = [
        (other, its)
        for other, its in serving
        if other.role is Role.PREFILL and its.fingerprint == offer.fingerprint
    ]
    if not readers:
        combined = node.role is Role.COMBINED
        return _direct(node, Reason.COMBINED if combined else Reason.NO_PREFILL_NODE, own)
    return _split(decode, readers, readings, ask)


class _Readings:
    """How each pool would read the prompt; worked out once, when it is asked for."""

    def __init__(self, serving: Sequence[Site], held: Mapping[PoolId, Held], ask: Ask) -> None:
        self._held = held
        self._ask = ask
        self._known: dict[PoolId, Reading] = {}
        pulling = ask.may_pull and not ask.recompute
        self._sources = (
            nlargest(
                PULL_SOURCES,
                (site for site in serving if site[0].sends),
                key=lambda site: self.held(site[0]).blocks,
            )
            if pulling
            else []
        )

    def held(self, node: NodeView) -> Held:
        return self._held.get(node.pool, NOTHING)

    def of(self, site: Site) -> Reading:
        node, offer = site
        known = self._known.get(node.pool)
        if known is None:
            sources = [n for n, its in self._sources if its.fingerprint == offer.fingerprint]
            pull, seconds = costs.best_pull(node, offer, self._held, sources)
            known = self._known[node.pool] = costs.reading(
                node, offer, self._ask.prefix_tokens, self.held(node), pull, seconds
            )
        return known


def _decoders(
    view: ClusterView, serving: list[tuple[NodeView, Offer]], ask: Ask
) -> list[tuple[NodeView, Offer]]:
    able = [pair for pair in serving if pair[0].role is not Role.PREFILL]
    if not able:
        raise RegionUnavailable(f"no node that can decode {ask.model!r} is up in this region")
    fitting = [p for p in able if ask.least_tokens <= _room(p[1])]
    if not fitting:
        decoding = [node for node in view.nodes if node.role is not Role.PREFILL]
        largest = max(_room(offer) for node in decoding if (offer := node.offer(ask.model)))
        if ask.least_tokens <= largest:
            raise RegionUnavailable(f"no node with room for this request of {ask.model!r} is up")
        raise ContextLengthExceeded(
            f"prompt and answer need {ask.least_tokens} tokens of KV; the largest node"
            f" that serves {ask.model!r} has room for {largest}"
        )
    return fitting


def _room(offer: Offer) -> int:
    return min(offer.context, offer.blocks * BLOCK_TOKENS)


def _has_slot(node: NodeView, ask: Ask) -> bool:
    return node.sequences < node.max_sequences and _accepts(node, ask)


def _accepts(node: NodeView, ask: Ask) -> bool:
    """False while nothing has changed since the node had no room for this very request."""
    return ask.refused.get(node.key) != node.changes


def _decode_cost(site: Site, read: Reading, mean: float) -> tuple[bool, float, int, PoolId]:
    """Overloaded last, then seconds: reading what is not cached, behind what it reads already,
    and an answer's time for the share of its sequences that are taken. `mean` sequences of all."""
    node, _ = site
    sequences = costs.sequences(node)
    overloaded = sequences > max(LOAD_RATIO * mean, mean + LOAD_MARGIN)
    seconds = read.seconds + costs.backlog_tokens(node) / node.prefill_tokens_per_s
    crowd = sequences / node.max_sequences
    seconds += crowd * TYPICAL_ANSWER_TOKENS / node.decode_tokens_per_s
    return overloaded, seconds, node.sequences, node.pool


def _reads_itself(remainder: int, ask: Ask, split_min_tokens: int) -> Reason | None:
    """Why no prefill node is even looked for."""
    if ask.recompute:
        return Reason.RECOMPUTE
    if ask.max_tokens == 1:
        return Reason.ONE_TOKEN
    if remainder < split_min_tokens:
        long = ask.prefix_tokens >= split_min_tokens
        return Reason.CACHED_ON_DECODE if long else Reason.SHORT_REMAINDER
    return None


def _split(
    decode: Site, readers: Sequence[Site], readings: _Readings, ask: Ask
) -> Placement | Wait:
    node, offer = decode
    own = readings.of(decode)
    missing = -(-ask.prefix_tokens // BLOCK_TOKENS) - readings.held(node).blocks

    def seconds(site: Site) -> float:
        return costs.split_s(
            site[0],
            readings.of(site),
            missing_blocks=missing,
            block_bytes=offer.block_bytes,
        )

    free = [
        site
        for site in readers
        if takes_prompt(site[0], readings.of(site).compute_tokens) and _accepts(site[0], ask)
    ]
    if not free:
        soon_s = min(map(seconds, readers))
        idle = node.sequences == 0 and node.prefill_tokens == 0
        now_s = costs.alone_s(node, own, next_stream=0 if idle else costs.NEXT_STREAM)
        if now_s >= soon_s:
            return Wait(Scarce.PREFILL)
        return _direct(node, Reason.PREFILL_BUSY, own, alone_s=now_s, split_s=soon_s)
    best = min(free, key=lambda site: (seconds(site), site[0].pool))
    alone_s, split_s, read = costs.alone_s(node, own), seconds(best), readings.of(best)
    if alone_s <= split_s:
        knows = own.held_tokens > read.held_tokens
        reason = Reason.CACHED_ON_DECODE if knows else Reason.NO_GAIN
        return _direct(node, reason, own, alone_s=alone_s, split_s=split_s)
    return Placement(
        prefill=best[0].pool,
        decode=node.pool,
        reason=Reason.SPLIT,
        compute_tokens=read.compute_tokens,
        cached_tokens=read.held_tokens,
        pull=read.pull,
        alone_s=alone_s,
        split_s=split_s,
    )


def expected_tokens(max_tokens: int | None, choices: int) -> int:
    """Tokens that an answer is counted with before it is there."""
    return min(max_tokens or TYPICAL_ANSWER_TOKENS, TYPICAL_ANSWER_TOKENS) * choices


def takes_prompt(node: NodeView, tokens: int) -> bool:
    """Whether a prefill node may be given a prompt of which it has to compute `tokens`."""
    backlog = node.prefill_tokens + tokens
    return node.prefills == 0 or backlog <= CHUNKS_OF_BACKLOG * node.max_step_tokens


def _direct(
    decode: NodeView,
    reason: Reason,
    read: Reading,
    *,
    alone_s: float | None = None,
    split_s: float | None = None,
) -> Placement:
    return Placement(
        prefill=None,
        decode=decode.pool,
        reason=reason,
        compute_tokens=read.compute_tokens + 1,
        cached_tokens=read.held_tokens,
        pull=read.pull,
        alone_s=alone_s,
        split_s=split_s,
    )
