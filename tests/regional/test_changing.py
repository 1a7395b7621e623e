"""A changed topology comes to a router that runs."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from core.events import Fault
from core.orders import (
    ORDERS_PATH,
    TOPOLOGY_PATH,
    OrderAsk,
    Orders,
    TopologyAsk,
    orders_file,
)
from tests.regional.fake_node import FakeNode, attempt_of
from tests.regional.fakes import Here, ask, delta, ending, region, run, topology

NODES = (("d1", "decode"), ("d2", "decode"))


async def told(here: Here, path: str) -> tuple[int, str]:
    """Status and body of the router's answer."""
    body = msgspec.json.encode(TopologyAsk(path))
    url = f"{here.base}{TOPOLOGY_PATH}"
    async with here.client.post(url, data=body, headers=here.headers) as answer:
        return answer.status, await answer.text()


async def answered(here: Here, node: FakeNode, model: str) -> bool:
    answer = here.asking(ask(model=model))
    node.output(attempt_of(await node.got("start")), delta("a"), *ending())
    return (await answer)[-1] == ending()[-1]


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


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, *NODES) as here:
            status, body = await told(here, f"{tmp_path}/absent.toml")
            assert status == 409
            assert "absent.toml: cannot be read: No such file" in body
            assert await losses(here) == {"d1": 0.0, "d2": 0.0}

    run(test())


def elsewhere(folder: Path) -> Path:
    """What a router is not to read: it could be taken, were it beside its own."""
    file = folder / "elsewhere" / "more.toml"
    file.parent.mkdir()
    file.write_text(topology([("d3", "decode")]))
    return file


@pytest.mark.parametrize(
    "path",
    [
        "elsewhere/more.toml", "elsewhere/absent.toml", "x/../elsewhere/more.toml", "link.toml",
        "linked/more.toml", "more", "pipe.toml", "folder.toml", "x" * 300 + ".toml", "loop.toml",
        ".", "", "a\0b", "/etc/passwd", "/dev/null",
    ],
)  # fmt: skip
def test_none_but_a_topology_beside_its_own_is_read(tmp_path: Path, path: str) -> None:
    """Nor does the answer say what there is."""

    async def test() -> None:
        foreign = elsewhere(tmp_path)
        (tmp_path / "link.toml").symlink_to(foreign)
        (tmp_path / "linked").symlink_to(foreign.parent)
        (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
        (tmp_path / "more").write_text(foreign.read_text())
        (tmp_path / "folder.toml").mkdir()
        os.mkfifo(tmp_path / "pipe.toml")
        async with region(tmp_path, *NODES) as here:
            status, body = await told(here, os.path.join(tmp_path, path))
            assert status == 409
            said = msgspec.json.decode(body)["error"]
            assert said["code"] == "topology_refused"
            assert said["message"] == (
                "a running router reads no topology but a file of its own folder, "
                f"{tmp_path}/*.toml"
            )
            assert await losses(here) == {"d1": 0.0, "d2": 0.0}

    run(test())


def test_a_stranger_s_file_in_a_folder_that_all_may_write_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /tmp: there they cannot change the file that the router was started with."""

    async def test() -> None:
        async with region(tmp_path, *NODES) as here:
            file = tmp_path / "more.toml"
            file.write_text(topology([("d3", "decode")]))
            ours = os.geteuid()
            monkeypatch.setattr("regional.changing._owners", lambda _: {ours + 1})
            status, body = await told(here, str(file))
            assert (status, "a file of its own folder" in body) == (409, True)
            monkeypatch.setattr("regional.changing._owners", lambda _: {ours})
            assert await told(here, str(file)) == (204, "")

    run(test())


def test_a_link_to_a_file_beside_is_as_good_as_the_file(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "more.toml").write_text(topology([("d2", "decode"), ("d3", "decode")]))
        (tmp_path / "current.toml").symlink_to("more.toml")
        async with region(tmp_path, *NODES) as here:
            assert await told(here, str(tmp_path / "current.toml")) == (204, "")
            assert await losses(here) == {"d2": 0.0, "d3": 0.0}

    run(test())


def test_a_full_disk_leaves_all_as_it_was(tmp_path: Path) -> None:
    """A node that rests by order goes, and that the order goes with it cannot be written."""

    async def test() -> None:
        async with region(tmp_path, *NODES) as here:
            url = f"{here.base}{ORDERS_PATH}"
            rest = msgspec.json.encode(OrderAsk(nodes={"d1": True}))
            async with here.client.post(url, data=rest, headers=here.headers) as answer:
                assert answer.status == 200
            file = tmp_path / "more.toml"
            text = topology([("d2", "decode"), ("d3", "decode")])
            file.write_text(text.replace('"small"', '"little"'))
            fresh = orders_file(tmp_path, "here").with_suffix(".new")
            fresh.symlink_to("/dev/full")

            status, body = await told(here, str(file))
            said = msgspec.json.decode(body)["error"]
            assert (status, said["code"]) == (500, "internal_error")
            assert "orders-here.json: No space left on device" in said["message"]
            assert await losses(here) == {"d1": 0.0, "d2": 0.0}
            node = await here.joined("d2", "decode")
            assert await answered(here, node, "small")
            (fault,) = await here.events(ask(model="little"))
            assert isinstance(fault, Fault)
            assert fault.code == "model_not_found"
            async with here.client.get(url, headers=here.headers) as answer:
                assert msgspec.json.decode(await answer.read(), type=Orders).nodes == ("d1",)

            fresh.unlink(missing_ok=True)  # there is room again
            assert await told(here, str(file)) == (204, "")
            assert await losses(here) == {"d2": 0.0, "d3": 0.0}
            assert await answered(here, node, "little")
            async with here.client.get(url, headers=here.headers) as answer:
                assert msgspec.json.decode(await answer.read(), type=Orders) == Orders()

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
