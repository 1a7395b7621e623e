"""Who this node is and how it fares: the Join and Heartbeat messages."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Sequence

from core.config import Node
from core.engine.messages import Ready
from core.parallel import Plan
from core.types import BLOCK_TOKENS, WIRE_VERSION
from regional.node.front import Front
from regional.node.hosts.messages import Rank
from regional.node.tiers.node_tiers import NodeTiers
from regional.pb import node_pb2 as pb


class Identity:
    """One life of a node: the epoch is new with each."""

    def __init__(
        self,
        node: Node,
        secret: bytes,
        plan: Plan,
        ranks: Sequence[Rank],
        *,
        tiers: NodeTiers,
        release: str,
        scattered: bool = False,
    ) -> None:
        """`ranks`: all of `plan`, in order, wherever they are; `scattered`: not all here."""
        self._node = node
        self._secret = secret
        self._plan = plan
        self._ranks = ranks
        self._ready = ranks[0].ready
        self._release = release
        self._scattered = scattered
        self._tiers = tiers
        self._epoch = secrets.token_hex(8)
        self._beats = itertools.count(1)
        self._began = time.monotonic()

    def join(self) -> pb.NodeMessage:
        ready = self._ready
        offer = pb.ModelOffer(
            name=self._node.model,
            fingerprint=ready.fingerprint,
            context=ready.context,
            kv_bytes_per_token=block_bytes(self._ranks, self._plan) // BLOCK_TOKENS,
            blocks=ready.geometry.blocks[0],
            prefill_tokens_per_s=ready.prefill_tokens_per_s,
            decode_tokens_per_s=ready.decode_tokens_per_s,
            tier_blocks=self._tiers.blocks,
        )
        return pb.NodeMessage(
            join=pb.Join(
                wire=WIRE_VERSION,
                name=self._node.name,
                epoch=self._epoch,
                role=self._node.role,
                secret=self._secret.decode(),
                release=self._release,
                models=[offer],
                max_sequences=ready.max_sequences,
                max_step_tokens=ready.max_step_tokens,
                pid=os.getpid(),
                pools=self._plan.dp_attention,
                plan=str(self._plan),
                age_s=time.monotonic() - self._began,
                scattered=self._scattered,
                ranks=[
                    pb.Rank(rank=one.rank, pid=one.pid, part=part_of(one.ready))
                    for one in self._ranks
                ],
            )
        )

    def heartbeat(self, front: Front, kv_bytes_per_s: float) -> pb.NodeMessage:
        stats = front.stats
        return pb.NodeMessage(
            heartbeat=pb.Heartbeat(
                sequence=next(self._beats),
                running=stats.running,
                waiting=stats.waiting,
                blocks_used=stats.blocks_used,
                blocks_cached=stats.blocks_cached,
                prefill_backlog_tokens=stats.prefill_backlog_tokens,
                prefill_tokens_per_s=stats.prefill_tokens_per_s or self._ready.prefill_tokens_per_s,
                decode_tokens_per_s=stats.decode_tokens_per_s or self._ready.decode_tokens_per_s,
                generated_tokens=stats.generated_tokens,
                computed_prompt_tokens=stats.computed_prompt_tokens,
                cached_prompt_tokens=stats.cached_prompt_tokens,
                preemptions=stats.preemptions,
                drafted_tokens=stats.drafted_tokens,
                accepted_tokens=stats.accepted_tokens,
                rank_bytes_sent=stats.sent_bytes,
                rank_bytes_least=stats.least_bytes,
                pipeline_bubble=stats.pipeline_bubble,
                stage_seconds=stats.stage_seconds,
                kv_bytes_sent=front.kv_bytes_sent,
                kv_bytes_received=front.kv_bytes_received,
                draining=front.draining,
                kv_bytes_per_s=kv_bytes_per_s,
                tier_bytes_per_s=self._tiers.bytes_per_s,
                tiers=self._tiers.status(),
            )
        )


def block_bytes(ranks: Sequence[Rank], plan: Plan) -> int:
    """Bytes that one block of a pool takes on all of its ranks, copies of heads included."""
    members = set(plan.members(0))
    return sum(
        group.block_bytes
        for one in ranks
        if one.rank in members
        for group in one.ready.geometry.groups
    )


def part_of(ready: Ready) -> str:
    """`layers 0-14, KV heads 0-2` of each group that a rank holds something of; latents have no
    heads."""
    return "; ".join(
        f"layers {_span(group.first_layer, group.layers)}, "
        + (
            "latent KV"
            if group.kind == "latent"
            else f"KV heads {_span(group.first_head, group.kv_heads)}"
        )
        for group in ready.geometry.groups
        if group.layers
    )


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
