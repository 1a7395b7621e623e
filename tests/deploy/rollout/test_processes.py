"""What `skerry status` says of each process."""

from __future__ import annotations

from typing import Any

from core.status import NodeStatus, RegionStatus
from core.types import ModelName, NodeName, RegionName, Role
from deploy.rollout.messages import Seen
from deploy.rollout.processes import process_lines
from deploy.status import EdgeView, RegionView


def node(name: str, **more: Any) -> NodeStatus:
    return NodeStatus(
        name=NodeName(name), role=Role.DECODE, model=ModelName("m"), release="2.0", **more
    )


STATUS = RegionStatus(
    region=RegionName("eu"), epoch="e", sequence=1, release="1.0",
    nodes=(
        node("eu-a"), node("eu-b", draining=True), node("eu-c", alive=False),
        node("eu-d", alive=False, off=True), node("eu-e", alive=False, off=True),
    ),
)  # fmt: skip
VIEW = EdgeView(
    edge="ams",
    version="1.0",
    regions=(RegionView("eu", "fresh", STATUS), RegionView("us", "suspect")),
)


def cells(seen: list[Seen], *silent: str) -> dict[str, list[str]]:
    rows = [line.split("  ") for line in process_lines(VIEW, seen, silent)]
    return {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}


def test_from_afar_there_is_what_an_edge_knows() -> None:
    rows = cells([])
    assert rows["ams"][:3] == ["edge", "up", "1.0"]
    assert rows["eu"][:3] == ["router", "up", "1.0"]
    assert rows["us"][:3] == ["router", "suspect", "–"]
    assert [rows[f"eu-{one}"][1] for one in "abcd"] == ["up", "draining", "lost", "off"]
    assert rows["eu-a"][2] == "2.0"


def seen(name: str, kind: str, up_s: float, ended: str = "") -> Seen:
    return Seen(
        name=name, kind=kind, pid=7, release="3.0", folder="/src/next", up_s=up_s,
        topology="/run/topology-2.toml", ended=ended,
    )  # fmt: skip


def test_who_does_not_answer_is_not_up_though_it_runs() -> None:
    here = [
        seen("nyc", "edge", 9.0), seen("sfo", "edge", 9.0, "signal 9"), seen("eu", "router", 9.0),
        seen("eu.2", "router", 9.0), seen("eu.3", "router", 9.0),
    ]  # fmt: skip
    rows = cells(here, "nyc", "sfo", "eu", "eu.2", "us")
    assert [rows[name][1] for name in ("ams", "nyc", "sfo")] == [
        "up", "does not answer", "down, signal 9",
    ]  # fmt: skip
    assert [rows[name][1] for name in ("eu", "eu.2", "eu.3", "us")] == [
        "does not answer", "does not answer", "up", "does not answer",
    ]  # fmt: skip


def test_here_the_launcher_says_more() -> None:
    rows = cells(
        [
            seen("ams", "edge", 3.0),
            seen("nyc", "edge", 61.0, "exit code 2"),
            seen("eu-a", "node", 7300.0),
            seen("us-a", "node", 1.0),
            seen("eu-e", "node", 0.5),
        ]
    )
    assert rows["ams"] == ["edge", "up", "3.0", "7", "3s", "next, topology-2"]
    assert rows["nyc"][:2] == ["edge", "down, exit code 2"]
    assert rows["nyc"][4] == "1m"
    assert rows["eu-a"][4] == "2h01m"
    assert rows["us-a"][1] == "not heard"
    assert [rows[f"eu-{one}"][1] for one in "de"] == ["off", "starting"]
