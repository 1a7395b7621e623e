"""Which pools read and answer a prompt. Pure: a view of the cluster in, a decision out.

The decode node comes first: the one whose cache spares most, weighed against the work that it
holds. Then the prompt is split off to a prefill node when enough of it is left to read, or the
decode node reads it itself. Whatever cannot be placed now but can later is a `Wait`; what no node
could ever take raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from core.errors import ContextLengthExceeded, RegionUnavailable
from core.types import BLOCK_TOKENS, ModelName, PoolId, Role
from regional.cluster import ClusterView, NodeView, Offer

CHUNKS_OF_BACKLOG = 2
"""A prefill node takes another prompt while its backlog stays within so many of its steps."""
LOAD_RATIO = 1.25
LOAD_MARGIN = 2.0
"""A decode node above max(ratio × mean, mean + margin) sequences gets no more for its cache."""
TYPICAL_ANSWER_TOKENS = 256
MUCH_BETTER = 2.0
"""An idle decode node reads the rest itself when that is so many times quicker than a hand-off."""


class Reason(StrEnum):
    """Why a request went where it went."""

    SPLIT = "split"
    SHORT_REMAINDER = "short_remainder"
    CACHED_ON_DECODE = "cached_on_decode"
    COMBINED = "combined"
    NO_PREFILL_NODE = "no_prefill_node"
    PREFILL_BUSY = "prefill_busy"
    ONE_TOKEN = "one_token"
    RECOMPUTE = "recompute"


class Scarce(StrEnum):
    """What a waiting request waits for."""

    PREFILL = "prefill"
    DECODE = "decode"


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
    excluded: frozenset[int] = frozenset()
    refused: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def prefix_tokens(self) -> int:
        """What prefill makes: all but the last prompt token, which decode computes."""
        return self.prompt_tokens - 1

    @property
    def least_tokens(self) -> int:
        """KV that the request needs at the least to give its whole answer."""
        return self.prompt_tokens + (self.max_tokens or 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """`compute_tokens` is what the reading node has to compute, `cached_tokens` what it holds."""

    prefill: PoolId | None
    decode: PoolId
    reason: Reason
    compute_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    scarce: Scarce


def place(
    view: ClusterView, overlaps: Mapping[PoolId, int], ask: Ask, *, split_min_tokens: int
) -> Placement | Wait:
    """Decide. `overlaps` gives blocks of the first n−1 tokens that a pool holds.

    Raises RegionUnavailable when no node that could take it may be asked now, ContextLengthExceeded
    when no node of the region has a pool that is large enough.
    """
    cached = {pool: blocks * BLOCK_TOKENS for pool, blocks in overlaps.items()}
    serving = [
        (node, offer)
        for node in view.nodes
        if not node.draining
        and node.serial not in ask.excluded
        and (offer := node.offer(ask.model)) is not None
    ]
    decoders = _decoders(view, serving, ask)
    free = [(node, offer) for node, offer in decoders if _has_slot(node, ask)]
    if not free:
        return Wait(Scarce.DECODE)
    decode, offer = min(free, key=lambda pair: _decode_cost(pair[0], free, cached, ask))
    remainder = ask.prefix_tokens - cached.get(decode.pool, 0)
    itself = _reads_itself(remainder, ask, split_min_tokens)
    if itself is not None:
        return _direct(decode, itself, remainder, ask)
    readers = [
        node
        for node, other in serving
        if node.role is Role.PREFILL and other.fingerprint == offer.fingerprint
    ]
    if not readers:
        combined = decode.role is Role.COMBINED
        reason = Reason.COMBINED if combined else Reason.NO_PREFILL_NODE
        return _direct(decode, reason, remainder, ask)
    return _split(decode, remainder, readers, cached, ask)


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


def _decode_cost(
    node: NodeView, among: list[tuple[NodeView, Offer]], cached: Mapping[PoolId, int], ask: Ask
) -> tuple[bool, float, int, PoolId]:
    """Overloaded last, then seconds: reading what is not cached, behind what it reads already,
    and an answer's time for the share of its sequences that are taken."""
    mean = sum(other.sequences for other, _ in among) / len(among)
    overloaded = node.sequences > max(LOAD_RATIO * mean, mean + LOAD_MARGIN)
    unread = ask.prefix_tokens - cached.get(node.pool, 0) + node.prefill_tokens
    crowd = node.sequences / node.max_sequences
    seconds = unread / node.prefill_tokens_per_s
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
    decode: NodeView,
    remainder: int,
    readers: list[NodeView],
    cached: Mapping[PoolId, int],
    ask: Ask,
) -> Placement | Wait:
    def unread(node: NodeView) -> int:
        return ask.prefix_tokens - cached.get(node.pool, 0)

    def seconds(node: NodeView) -> float:
        return (unread(node) + node.prefill_tokens) / node.prefill_tokens_per_s

    idle = decode.sequences == 0 and decode.prefill_tokens == 0
    free = [n for n in readers if takes_prompt(n, unread(n)) and _accepts(n, ask)]
    if not free:
        return (
            _direct(decode, Reason.PREFILL_BUSY, remainder, ask) if idle else Wait(Scarce.PREFILL)
        )
    best = min(free, key=lambda node: (seconds(node), node.pool))
    alone = remainder / decode.prefill_tokens_per_s
    if idle and remainder < unread(best) and alone * MUCH_BETTER <= seconds(best):
        return _direct(decode, Reason.CACHED_ON_DECODE, remainder, ask)
    return Placement(
        prefill=best.pool,
        decode=decode.pool,
        reason=Reason.SPLIT,
        compute_tokens=unread(best),
        cached_tokens=ask.prefix_tokens - unread(best),
    )


def takes_prompt(node: NodeView, tokens: int) -> bool:
    """Whether a prefill node may be given a prompt of which it has to compute `tokens`."""
    backlog = node.prefill_tokens + tokens
    return node.prefills == 0 or backlog <= CHUNKS_OF_BACKLOG * node.max_step_tokens


def _direct(decode: NodeView, reason: Reason, remainder: int, ask: Ask) -> Placement:
    return Placement(
        prefill=None,
        decode=decode.pool,
        reason=reason,
        compute_tokens=remainder + 1,
        cached_tokens=ask.prefix_tokens - remainder,
    )
