"""What a page of metrics says of nodes: ranks and stages only where there are several."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from core.metrics import StatusCollector, render
from core.status import NodeStatus, RankStatus, RegionStatus, TierStatus
from core.types import ModelName, NodeName, RegionName, Role


def test_ranks_and_stages_are_told_of_nodes_that_have_several() -> None:
    alone = NodeStatus(name=NodeName("a"), role=Role.DECODE, model=ModelName("m"))
    split = NodeStatus(
        name=NodeName("b"), role=Role.DECODE, model=ModelName("m"), plan="pp 2",
        ranks=(RankStatus(0, 1, ""), RankStatus(1, 2, "")), rank_bytes_sent=4096,
        pipeline_bubble=0.25, stage_seconds=(3.0, 2.0),
    )  # fmt: skip
    status = RegionStatus(region=RegionName("eu"), epoch="e", sequence=1, nodes=(alone, split))
    registry = CollectorRegistry()
    StatusCollector(registry, lambda: [status])
    lines = render(registry).decode().splitlines()
    said = [line for line in lines if "rank_bytes" in line or "stage" in line or "bubble" in line]
    assert [line for line in said if not line.startswith("#")] == [
        'skerry_rank_bytes_total{node="b",region="eu"} 4096.0',
        'skerry_stage_seconds_total{node="b",region="eu",stage="0"} 3.0',
        'skerry_stage_seconds_total{node="b",region="eu",stage="1"} 2.0',
        'skerry_pipeline_bubble{node="b",region="eu"} 0.25',
    ]


def test_tiers_tell_what_they_hold_and_whether_they_are_used() -> None:
    node = NodeStatus(
        name=NodeName("a"), role=Role.DECODE, model=ModelName("m"),
        tiers=(
            TierStatus(kind="host", blocks=7),
            TierStatus(kind="disk", off="No space left on device", loaded=3, damaged=1),
        ),
    )  # fmt: skip
    status = RegionStatus(region=RegionName("eu"), epoch="e", sequence=1, nodes=(node,))
    registry = CollectorRegistry()
    StatusCollector(registry, lambda: [status])
    said = set(render(registry).decode().splitlines())
    assert {
        'skerry_tier_blocks{node="a",region="eu",tier="host"} 7.0',
        'skerry_tier_up{node="a",region="eu",tier="host"} 1.0',
        'skerry_tier_up{node="a",region="eu",tier="disk"} 0.0',
        'skerry_tier_block_events_total{event="loaded",node="a",region="eu",tier="disk"} 3.0',
        'skerry_tier_block_events_total{event="damaged",node="a",region="eu",tier="disk"} 1.0',
    } <= said
