"""The live line and the status table."""

import io
import json

import msgspec
import pytest
from rich.console import Console

from core.status import (
    ModelStatus,
    NodeStatus,
    RegionMore,
    RegionStatus,
    TierStatus,
    Wanted,
    as_json,
)
from core.types import ModelName, NodeName, RegionName, Role
from deploy.served import model_lines, scales
from deploy.status import (
    EdgeView,
    LiveLine,
    Load,
    RegionView,
    load_of,
    region_lines,
    status_lines,
    status_table,
)


def node(name: str, model: str = "m", **counts: int) -> NodeStatus:
    return NodeStatus(name=NodeName(name), role=Role.DECODE, model=ModelName(model), **counts)  # type: ignore[arg-type]  # counters only


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


FULL = RegionStatus(region=RegionName("eu"), epoch="e", sequence=1, nodes=(node("eu-1"),))
REGIONS = [RegionView("eu", "fresh", FULL), RegionView("us", "lost", None)]


def test_a_weight_is_shown_where_it_is_not_the_usual() -> None:
    eu, us = (RegionView(name, "fresh", FULL) for name in ("eu", "us"))
    usual = list(region_lines(EdgeView(edge="ams", regions=(eu, us))))
    assert "weight" not in usual[0]
    light = msgspec.structs.replace(eu, weight=50)
    heads, *rows = (line.split() for line in region_lines(EdgeView(regions=(light, us))))
    assert [heads[-1], *(row[-1] for row in rows)] == ["weight", "50", "100"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_status_table_fits_the_terminal_and_says_what_it_lacks(width: int) -> None:
    long = msgspec.structs.replace(
        FULL,
        nodes=(
            node("eu-prefill-1", model="smollm2-135m-instruct", blocks_total=1024),
            node("eu-decode-1", model="smollm2-135m-instruct", generated_tokens=1234567),
        ),
    )
    out = io.StringIO()
    regions = [RegionView("eu", "fresh", long), RegionView("us", "lost", None)]
    Console(file=out, width=width).print(status_table(regions, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    for shown in ("eu-prefill-1", "eu-decode-1", "decode", "lost, no node"):
        assert shown in out.getvalue()
    assert ("left out on" in out.getvalue()) is (width < 200)


def test_status_into_a_pipe_is_a_line_for_each_node_of_equally_many_words() -> None:
    lines = list(status_lines(REGIONS))
    assert [line.split()[:5] for line in lines] == [
        ["region", "node", "role", "model", "state"],
        ["eu", "eu-1", "decode", "m", "up"],
        ["us", "–", "–", "–", "lost,no_node"],
    ]
    assert {len(line.split()) for line in lines} == {11}


def test_status_as_json_leaves_nothing_out() -> None:
    """The frames leave out what holds its default; a page is for those who do not know those."""
    page = json.loads(as_json(FULL))
    assert page["draining"] is False
    assert page["nodes"][0]["role"] == "decode"
    assert page["nodes"][0]["running"] == 0
    assert msgspec.json.decode(as_json(FULL), type=RegionStatus) == FULL


def test_a_tier_has_a_line_with_what_it_holds_and_why_it_is_off() -> None:
    tiers = (
        TierStatus(kind="host", blocks=3, places=9),
        TierStatus(kind="disk", off="No space left on device", places=7),
    )
    kept = msgspec.structs.replace(FULL, nodes=(msgspec.structs.replace(node("n"), tiers=tiers),))
    lines = [line.split("  ") for line in status_lines([RegionView("eu", "fresh", kept)])]
    said = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert said[2][:5] == ["eu", "n/host", "tier", "3/9_blocks", "up"]
    assert said[3][:5] == ["eu", "n/disk", "tier", "0/7_blocks", "No_space_left_on_device"]


def test_a_node_that_is_not_meant_to_run_is_off_and_not_lost() -> None:
    nodes = tuple(
        msgspec.structs.replace(node(name), alive=False, off=off)
        for name, off in (("here", True), ("gone", False))
    )
    status = msgspec.structs.replace(FULL, nodes=nodes)
    lines = [line.split() for line in status_lines([RegionView("eu", "fresh", status)])]
    assert [line[4] for line in lines[1:]] == ["off", "lost"]


def test_models_are_warm_cold_or_out() -> None:
    names = {"warm": 0.0, "cold": 4.25, "queued": 9.0}
    status = msgspec.structs.replace(
        FULL,
        models=tuple(
            ModelStatus(name=ModelName(name), context=9, start_s=start_s)
            for name, start_s in names.items()
        ),
        nodes=tuple(
            msgspec.structs.replace(node(name, model=model), alive=alive, pool=pool)
            for name, model, alive, pool in (
                ("a", "warm", True, ""), ("b", "warm", False, "gpu"), ("c", "cold", False, ""),
                ("d", "lost", False, ""), ("e", "queued", False, "gpu"),
            )
        ),
        more=RegionMore(
            wanted=(
                Wanted(model=ModelName("warm"), role="decode", nodes=1, why="calm"),
                Wanted(model=ModelName("cold"), role="decode", nodes=0, why="idle"),
                Wanted(
                    model=ModelName("queued"), role="decode", nodes=1, why="asked", waiting=3,
                    no_place=True,
                ),
            )
        ),
    )  # fmt: skip
    views = [RegionView("eu", "fresh", status), RegionView("us", "lost", None)]
    assert [line.split() for line in model_lines(views)] == [
        ["model", "region", "state", "role", "up", "wanted", "why", "pool"],
        ["cold", "eu", "cold,~4.2s", "decode", "0/1", "0", "idle", "–"],
        ["lost", "eu", "out", "decode", "0/1", "all", "–", "–"],
        ["queued", "eu", "waits-for-a-place", "decode", "0/1", "1", "asked", "gpu"],
        ["warm", "eu", "warm", "decode", "1/2", "1", "calm", "gpu"],
    ]
    assert scales(views)
    assert not scales(REGIONS)
