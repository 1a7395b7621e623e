"""The live line and the status table."""

import io

from rich.console import Console

from core.status import NodeStatus, RegionStatus
from core.types import ModelName, NodeName, RegionName, Role
from deploy.status import LiveLine, Load, RegionView, load_of, status_table


def node(name: str, **counts: int) -> NodeStatus:
    return NodeStatus(name=NodeName(name), role=Role.DECODE, model=ModelName("m"), **counts)  # type: ignore[arg-type]  # counters only


def test_load_sums_over_nodes() -> None:
    nodes = [
        node("a", running=2, generated_tokens=10, blocks_used=5, blocks_total=50),
        node("b", waiting=1, generated_tokens=7, blocks_total=50),
    ]
    assert load_of(nodes) == Load(
        running=2, waiting=1, generated=17, blocks_used=5, blocks_total=100
    )


def test_live_line_counts_tokens_since_the_last_one() -> None:
    line = LiveLine()
    assert line.text(Load(0, 0, 100, 0, 0), 10.0) == (
        "0 running, 0 waiting, 0 tokens/s, KV 0% in use"
    )
    assert line.text(Load(3, 1, 180, 25, 100), 12.0) == (
        "3 running, 1 waiting, 40 tokens/s, KV 25% in use"
    )


def test_live_line_after_a_restart_is_never_negative() -> None:
    line = LiveLine()
    line.text(Load(1, 0, 500, 0, 10), 1.0)
    assert " 0 tokens/s" in line.text(Load(1, 0, 3, 0, 10), 2.0)


def test_status_table_shows_nodes_and_empty_regions() -> None:
    full = RegionStatus(region=RegionName("eu"), epoch="e", sequence=1, nodes=(node("eu-1"),))
    out = io.StringIO()
    regions = [RegionView("eu", "fresh", full), RegionView("us", "lost", None)]
    Console(file=out, width=120).print(status_table(regions))
    assert "eu-1" in out.getvalue()
    assert "lost, no node" in out.getvalue()
