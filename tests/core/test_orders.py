"""An operator's orders: what they add up to, and that they outlive a process."""

from pathlib import Path

import msgspec
import pytest

from core.orders import OrderAsk, Orders, orders_file, read_orders, write_orders


def test_what_is_not_said_stays() -> None:
    orders = Orders().changed(OrderAsk(nodes={"a": True, "b": True}, weight=50))
    assert orders == Orders(nodes=("a", "b"), weight=50)
    orders = orders.changed(OrderAsk(resting=True))
    assert orders == Orders(resting=True, nodes=("a", "b"), weight=50)
    orders = orders.changed(OrderAsk(nodes={"a": False, "c": False}, weight=0, resting=False))
    assert orders == Orders(nodes=("b",))


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
