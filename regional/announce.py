"""How an edge is told where its request went, and what was weighed."""

from __future__ import annotations

from core.events import Accepted, Moved, Placing, encode_frame
from regional.dispatch import Placed


def announcement(placed: Placed, prompt_tokens: int, *, again: bool) -> bytes:
    """The frame of Accepted, or of Moved for a request that was accepted before."""
    placement = placed.placement
    prefill = placement.prefill.node if placement.prefill else None
    pull = placement.pull
    placing = Placing(
        reusable_tokens=placed.reusable_tokens,
        held_tokens=placement.cached_tokens,
        pulled_tokens=pull.tokens if pull else 0,
        pulled_from=pull.source.node if pull else None,
        compute_tokens=placement.compute_tokens,
        alone_s=placement.alone_s,
        split_s=placement.split_s,
    )
    if again:
        return encode_frame(
            Moved(
                prefill=prefill,
                decode=placement.decode.node,
                reason=placement.reason,
                placing=placing,
            )
        )
    return encode_frame(
        Accepted(
            prefill=prefill,
            decode=placement.decode.node,
            prompt_tokens=prompt_tokens,
            reason=placement.reason,
            placing=placing,
        )
    )
