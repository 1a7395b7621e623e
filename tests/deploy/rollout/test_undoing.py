"""Orders of a rollout that the end of the world broke off hold no more at the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError
from core.orders import OrderAsk, Orders, orders_file, read_orders, write_orders
from deploy.fleet import WorldEnds
from deploy.launcher import run_world
from deploy.rollout.act import RolledBack
from deploy.rollout.steps import Beside, Idle, Kind, Rest, Stop, Weigh
from deploy.rollout.undoing import kept_for_the_next_start, undo, way_home
from deploy.where import SHIPPED
from tests.deploy.rollout.test_plan import SPLIT, TWO, region, standing, topology

THREE = topology(*TWO.regions, region("asia", *SPLIT, routers=2))
LEAVES = (Rest(Kind.REGION, "asia", True, leaving=True), Idle(Kind.REGION, "asia"), Stop("asia"))
HOME = {"asia": OrderAsk(resting=False), "asia.2": OrderAsk(resting=False)}


def test_all_that_is_ordered_has_its_way_home() -> None:
    before = standing(THREE, resting=frozenset({"us", "eu-write"}), weights={"eu": 40})
    steps = (
        *LEAVES,
        Rest(Kind.ROUTER, "asia.2", True),
        Rest(Kind.NODE, "eu-read", True),
        Rest(Kind.NODE, "eu-write", True),
        Weigh("eu", 4),
        Rest(Kind.REGION, "us", True),
        Beside("ams"),
    )
    assert way_home(steps, before, THREE) == {
        **HOME,
        "eu": OrderAsk(nodes={"eu-read": False, "eu-write": True}, weight=40),
        "us": OrderAsk(resting=True),
    }


def test_a_node_that_only_its_region_still_has_is_ordered_there() -> None:
    before = standing(THREE)
    steps = (Rest(Kind.NODE, "asia-read", True),)
    less = topology(*TWO.regions, region("asia", SPLIT[1], routers=2))
    ask = OrderAsk(nodes={"asia-read": False})
    assert way_home(steps, before, less) == {"asia": ask, "asia.2": ask}


def break_off(state: Path, **orders: Orders) -> None:
    """The world ends while a rollout of asia is under way; these are in force by then."""
    for name, one in orders.items():
        write_orders(orders_file(state, name.replace("_", ".")), one)
    with pytest.raises(WorldEnds), kept_for_the_next_start(state, HOME):
        raise WorldEnds


def test_the_end_of_the_world_keeps_it_and_the_next_start_undoes_what_was_ordered(
    tmp_path: Path,
) -> None:
    left = Orders(resting=True, leaving=True)
    break_off(tmp_path, asia=Orders(resting=True, leaving=True, weight=7), asia_2=left)
    said: list[str] = []
    undo(tmp_path, said.append)
    assert read_orders(orders_file(tmp_path, "asia")) == Orders(weight=7)
    assert [path.name for path in tmp_path.iterdir()] == ["orders-asia.json"], "nothing else is"
    assert said == [
        "a rollout was under way when the world ended: what it had ordered of asia, asia.2 is "
        "undone"
    ]
    undo(tmp_path, said.append)
    assert len(said) == 1


def test_what_the_operator_ordered_meanwhile_stays(tmp_path: Path) -> None:
    break_off(tmp_path, eu=Orders(resting=True))
    said: list[str] = []
    undo(tmp_path, said.append)
    assert read_orders(orders_file(tmp_path, "eu")) == Orders(resting=True)
    assert said == [], "it had ordered nothing yet"


def test_a_rollout_that_ends_leaves_nothing(tmp_path: Path) -> None:
    with kept_for_the_next_start(tmp_path, HOME):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RolledBack), kept_for_the_next_start(tmp_path, HOME):
        raise RolledBack("and the world is as it was")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_said_and_stops_no_start(tmp_path: Path) -> None:
    break_off(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{", encoding="utf-8")
    said: list[str] = []
    undo(tmp_path, said.append)
    assert "`skerry undrain NAME`" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_start_undoes_it_before_a_process_could_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_further(*_: object, **__: object) -> None:
        assert read_orders(orders_file(tmp_path, "asia")) == Orders()
        raise ConfigError("no further")

    (tmp_path / "lock").touch()
    break_off(tmp_path, asia=Orders(resting=True, leaving=True))
    monkeypatch.setattr("deploy.launcher.running", no_further)
    said: list[str] = []
    with (
        pytest.raises(ConfigError, match="no further"),
        run_world(SHIPPED / "local.toml", say=said.append, state=tmp_path),
    ):
        raise AssertionError("it does not start")
    assert said[0].endswith("what it had ordered of asia is undone")
