"""A changed topology comes to a router that runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from core.orders import TOPOLOGY_PATH, TopologyAsk
from tests.regional.fakes import Here, region, run, topology

NODES = (("d1", "decode"), ("d2", "decode"))


async def told(here: Here, path: str) -> tuple[int, str]:
    """Status and body of the router's answer."""
    ask = msgspec.json.encode(TopologyAsk(path))
    url = f"{here.base}{TOPOLOGY_PATH}"
    async with here.client.post(url, data=ask, headers=here.headers) as answer:
        return answer.status, await answer.text()


async def losses(here: Here) -> dict[str, float]:
    """By node: how often it was lost, of those that have a series."""
    async with here.client.get(f"{here.base}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    start = 'skerry_router_lost_nodes_total{node="'
    found = (one.removeprefix(start).split('"} ') for one in lines if one.startswith(start))
    return {name: float(count) for name, count in found}


def test_losses_of_a_node_that_came_later_count_from_the_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *NODES) as here:
            file = tmp_path / "more.toml"
            file.write_text(topology([("d2", "decode"), ("d3", "decode")]))
            assert await told(here, str(file)) == (204, "")
            assert await losses(here) == {"d2": 0.0, "d3": 0.0}
            node = await here.joined("d3", "decode")
            await node.die()
            await here.until(lambda: not list(here.app.router.cluster.members()))
            assert await losses(here) == {"d2": 0.0, "d3": 1.0}

    run(test())


@pytest.mark.parametrize("path", ["absent.toml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, path: str) -> None:
    async def test() -> None:
        async with region(tmp_path, *NODES) as here:
            status, body = await told(here, f"{tmp_path}/{path}")
            assert status == 409
            assert "cannot be read" in body
            assert await losses(here) == {"d1": 0.0, "d2": 0.0}

    run(test())


def test_what_only_a_start_can_take_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *NODES) as here:
            file = tmp_path / "more.toml"
            file.write_text(topology([("d3", "decode")], queue=7))
            status, body = await told(here, str(file))
            assert status == 409
            assert "does not take another [limits]" in body
            assert await losses(here) == {"d1": 0.0, "d2": 0.0}

    run(test())
