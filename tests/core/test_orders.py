"""An operator's orders: what they add up to, and that they outlive a process."""

from pathlib import Path

import msgspec
import pytest

from core.errors import InternalError
from core.orders import OrderAsk, Orders, orders_file, read_orders, write_orders


def test_what_is_not_said_stays() -> None:
    orders = Orders().changed(OrderAsk(nodes={"a": True, "b": True}, weight=50))
    assert orders == Orders(nodes=("a", "b"), weight=50)
    orders = orders.changed(OrderAsk(resting=True))
    assert orders == Orders(resting=True, nodes=("a", "b"), weight=50)
    orders = orders.changed(OrderAsk(nodes={"a": False, "c": False}, weight=0, resting=False))
    assert orders == Orders(nodes=("b",))


def test_to_leave_is_to_rest_until_it_rests_no_more() -> None:
    leaving = Orders().changed(OrderAsk(resting=True, leaving=True))
    assert leaving == Orders(resting=True, leaving=True)
    assert leaving.changed(OrderAsk(weight=5)).leaving
    assert leaving.changed(OrderAsk(resting=True)) == Orders(resting=True)
    assert leaving.changed(OrderAsk(resting=False)) == Orders()
    assert Orders().changed(OrderAsk(resting=False, leaving=True)) == Orders()


def test_they_are_kept_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    path = orders_file(tmp_path, "eu")
    assert read_orders(path) == Orders()
    write_orders(path, Orders(nodes=("a",)))
    assert read_orders(path) == Orders(nodes=("a",))
    path.write_bytes(b"\x00")
    assert read_orders(path) == Orders()


@pytest.mark.parametrize("body", [b'{"weight": -1}', b'{"weight": 10001}', b'{"nodes": {"a": 1}}'])
def test_what_no_order_is(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=OrderAsk)


def test_what_cannot_be_written_leaves_what_was(tmp_path: Path) -> None:
    path = orders_file(tmp_path, "eu")
    write_orders(path, Orders(weight=7))
    path.with_suffix(".new").symlink_to("/dev/full")
    with pytest.raises(InternalError, match=r"orders-eu\.json: No space left on device"):
        write_orders(path, Orders(weight=8))
    assert read_orders(path) == Orders(weight=7)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
