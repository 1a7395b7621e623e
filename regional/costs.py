"""What reading a prompt here or there would take, in seconds, from what the nodes have measured.

Pure arithmetic; `placement` compares the results. A running stream that has to wait counts as much
as the prompt that makes it wait: what is compared are the seconds that all of them lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.types import BLOCK_TOKENS, PoolId
from regional.cluster import NodeView, Offer
from regional.kv_index import Held

ROUND_TRIP_S = 0.004
"""One question to a node and its answer, at the end of the step that it is in."""
HANDOFF_S = 0.01
"""What a hand-off takes beside reading and moving: reserving, and the beginning of the answer."""
NEXT_STREAM = 1
"""A decode node is kept free for decoding: one more stream than runs is counted as disturbed."""
LEAST_PATIENCE_S = 0.5
NOTHING = Held()


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Blocks `first` to `first + count` of the prompt's chain, fetched from another pool.
    `patience_s`: after so long the reader computes what has not come."""

    source: PoolId
    first: int
    count: int
    patience_s: float = LEAST_PATIENCE_S

    @property
    def tokens(self) -> int:
        return self.count * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Reading:
    """How one pool would read a prompt. `held_tokens`: what it holds itself, in any tier;
    `compute_tokens` what is left to compute after that and after the pull; `fetch_s`: until what it
    need not compute is in its memory."""

    held_tokens: int
    compute_tokens: int
    fetch_s: float
    compute_s: float
    pull: PullPlan | None

    @property
    def seconds(self) -> float:
        return self.fetch_s + self.compute_s


def reading(
    node: NodeView, offer: Offer, tokens: int, held: Held, pull: PullPlan | None, pull_s: float
) -> Reading:
    """How `node` would read the first `tokens` of a prompt of which it holds `held`."""
    held_tokens = held.blocks * BLOCK_TOKENS
    compute = tokens - held_tokens - (pull.tokens if pull else 0)
    fetch_s = held.below * offer.block_bytes / node.tier_bytes_per_s + pull_s
    return Reading(held_tokens, compute, fetch_s, compute / node.prefill_tokens_per_s, pull)


def best_pull(
    node: NodeView,
    offer: Offer,
    held: Mapping[PoolId, Held],
    sources: Iterable[NodeView],
) -> tuple[PullPlan | None, float]:
    """The pull that spares `node` the most time, and how long it takes; None where computing is as
    quick. What a source has in a tier below its memory it would have to load first: only what lies
    in memory is taken."""
    own = held.get(node.pool, NOTHING).blocks
    best: PullPlan | None = None
    best_s = gained_s = 0.0
    for source in sources:
        there = held.get(source.pool, NOTHING)
        count = there.blocks - own
        if source.pool == node.pool or count <= 0 or there.below:
            continue
        seconds = pull_s(count, offer.block_bytes, source)
        gain_s = count * BLOCK_TOKENS / node.prefill_tokens_per_s - seconds
        if gain_s > gained_s:
            patience_s = max(LEAST_PATIENCE_S, 2 * (gain_s + seconds))
            best = PullPlan(source.pool, own, count, patience_s)
            best_s, gained_s = seconds, gain_s
    return best, best_s


def pull_s(blocks: int, block_bytes: int, source: NodeView) -> float:
    """Fetching blocks, nothing of it hidden."""
    return blocks * block_bytes / source.kv_bytes_per_s + ROUND_TRIP_S


def exposed_s(transfer_s: float, compute_s: float, chunks: float) -> float:
    """What of a transfer is not hidden behind the computing: each chunk leaves while the next one
    is computed, and nothing hides the last."""
    last = 1 / max(1.0, chunks)
    return max(transfer_s - compute_s * (1 - last), transfer_s * last)


def alone_s(decode: NodeView, read: Reading, *, next_stream: int = NEXT_STREAM) -> float:
    """Seconds that are lost when the decode node reads the prompt: behind what it reads already,
    and while it computes each of its streams waits too."""
    waiting_s = decode.prefill_tokens / decode.prefill_tokens_per_s
    disturbed = decode.sequences + next_stream
    return waiting_s + read.fetch_s + read.compute_s * (1 + disturbed)


def split_s(prefill: NodeView, read: Reading, *, missing_blocks: int, block_bytes: int) -> float:
    """Seconds until a prompt that `prefill` reads is whole at the decode node, which lacks
    `missing_blocks` of it."""
    backlog_s = backlog_tokens(prefill) / prefill.prefill_tokens_per_s
    transfer_s = missing_blocks * block_bytes / prefill.kv_bytes_per_s
    chunks = read.compute_tokens / prefill.max_step_tokens
    return backlog_s + read.seconds + exposed_s(transfer_s, read.compute_s, chunks) + HANDOFF_S


def backlog_tokens(node: NodeView) -> float:
    """What a fresh node has counts for more."""
    return node.prefill_tokens / node.share


def sequences(node: NodeView) -> float:
    return node.sequences / node.share
