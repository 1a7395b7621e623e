"""Who this node is and how it fares: the Join and Heartbeat messages."""

from __future__ import annotations

import itertools
import os
import secrets

from core.config import Node
from core.engine.messages import Ready
from core.types import WIRE_VERSION
from regional.node.front import Front
from regional.pb import node_pb2 as pb


class Identity:
    """One life of a node: the epoch is new with each."""

    def __init__(self, node: Node, secret: bytes, ready: Ready, *, release: str) -> None:
        self._node = node
        self._secret = secret
        self._ready = ready
        self._release = release
        self._epoch = secrets.token_hex(8)
        self._beats = itertools.count(1)

    def join(self) -> pb.NodeMessage:
        ready = self._ready
        offer = pb.ModelOffer(
            name=self._node.model,
            fingerprint=ready.fingerprint,
            context=ready.context,
            kv_bytes_per_token=ready.geometry.bytes_per_token,
            blocks=ready.geometry.blocks[0],
            prefill_tokens_per_s=ready.prefill_tokens_per_s,
            decode_tokens_per_s=ready.decode_tokens_per_s,
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
            )
        )

    def heartbeat(self, front: Front) -> pb.NodeMessage:
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
                kv_bytes_sent=front.kv_bytes_sent,
                kv_bytes_received=front.kv_bytes_received,
                draining=front.draining,
            )
        )
