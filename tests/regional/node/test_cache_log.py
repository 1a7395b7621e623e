"""Snapshots in parts: other routers hear only changes, and must see no gap in their numbers."""

from __future__ import annotations

import pytest

from core.types import NodeName, PoolId
from regional.kv_index import BELOW, KvIndex
from regional.node import cache_log
from regional.node.cache_log import CacheLog
from regional.pb import node_pb2 as pb

POOL = PoolId(NodeName("n"), 0)
BLOCKS = [bytes([n]) * 16 for n in range(10)]


def hears(index: KvIndex, message: pb.NodeMessage | None) -> bool:
    assert message is not None
    events = message.cache_events
    return index.apply(
        POOL,
        sequence=events.sequence,
        snapshot=events.snapshot,
        stored=events.stored,
        evicted=events.evicted,
        tier=events.tier,
    )


@pytest.mark.parametrize("tier", [0, BELOW])
def test_a_router_that_comes_later_disturbs_no_other(
    monkeypatch: pytest.MonkeyPatch, tier: int
) -> None:
    monkeypatch.setattr(cache_log, "_HASHES_A_MESSAGE", 3)
    log = CacheLog(0, tier)
    first, late = KvIndex(), KvIndex()
    for index in (first, late):
        index.join(POOL, limit=100, below=100)
    assert all(hears(first, one) for one in log.snapshot())
    assert hears(first, log.change(BLOCKS[:8], ()))
    parts = log.snapshot()
    assert len(parts) == 3
    assert all(hears(late, one) for one in parts)
    change = log.change(BLOCKS[8:], BLOCKS[:1])
    for index in (first, late):
        assert hears(index, change)
        assert index.size(POOL, tier) == 9
        assert not index.holds(BLOCKS[0])
