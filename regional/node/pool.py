"""One KV pool of a node: the ranks that hold it together, seen through the one that schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from core.engine.messages import Abort, EngineStats
from regional.node.cache_log import CacheLog
from regional.node.receiving import Receiving
from regional.node.seams import Rank, Sending

_NO_STATS = EngineStats(
    running=0, waiting=0, blocks_used=0, blocks_cached=0, blocks_total=0,
    prefill_backlog_tokens=0, prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0,
    generated_tokens=0, computed_prompt_tokens=0, cached_prompt_tokens=0, preemptions=0,
)  # fmt: skip
_RATES = ("prefill_tokens_per_s", "decode_tokens_per_s", "pipeline_bubble")


class Pool:
    """`number` is the data-parallel rank; a node has one pool for each."""

    def __init__(self, number: int, rank: Rank, sending: Sending, receiving: Receiving) -> None:
        self.number = number
        self.rank = rank
        self.sending = sending
        self.receiving = receiving
        self.cache = CacheLog(number)
        self.stats = _NO_STATS

    def abort(self, sequences: Iterable[Abort]) -> None:
        for abort in sequences:
            self.rank.send(abort)


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """Of a whole node: counts are summed, rates are the mean over its pools."""
    if len(stats) == 1:
        return stats[0]
    first = msgspec.structs.asdict(stats[0])
    summed = {name: sum(getattr(one, name) for one in stats)
              for name, value in first.items() if isinstance(value, int | float)}  # fmt: skip
    for name in _RATES:
        summed[name] /= len(stats)
    stages = zip(*(one.stage_seconds for one in stats), strict=False)
    return EngineStats(**summed, stage_seconds=tuple(map(sum, stages)))
