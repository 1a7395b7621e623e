"""Orders to a router's nodes, while the nodes come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError, InternalError, InvalidRequest
from core.orders import OrderAsk, Orders, read_orders
from regional.orders import OrderBook


def test_a_node_that_goes_takes_orders_until_it_has_gone(tmp_path: Path) -> None:
    said: list[Orders] = []
    book = OrderBook(tmp_path / "orders.json", ["a", "b"], changed=said.append)
    book.know(["a"])
    assert book.take(OrderAsk(nodes={"b": True})).nodes == ("b",)
    book.know(["a"])
    assert said[-1].nodes == ()
    with pytest.raises(InvalidRequest, match="no node 'b'; it has: a"):
        book.take(OrderAsk(nodes={"b": True}))


def test_a_node_that_comes_again_has_no_orders(tmp_path: Path) -> None:
    said: list[Orders] = []
    file = tmp_path / "orders.json"
    book = OrderBook(file, ["a", "b"], changed=said.append)
    book.take(OrderAsk(nodes={"a": True, "b": True}, weight=7))
    book.know(["a"])
    book.know(["a", "b"])
    assert said[-1] == book.now == read_orders(file) == Orders(nodes=("a",), weight=7)


def test_a_node_that_comes_again_has_none_either_where_the_router_began_anew(
    tmp_path: Path,
) -> None:
    file = tmp_path / "orders.json"
    OrderBook(file, ["a", "b"], changed=lambda _: None).take(OrderAsk(nodes={"a": True, "b": True}))
    OrderBook(file, ["a"], changed=lambda _: None)
    said: list[Orders] = []
    OrderBook(file, ["a", "b"], changed=said.append)
    assert said[-1] == read_orders(file) == Orders(nodes=("a",))


def test_an_order_that_cannot_be_kept_does_not_hold(tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    said: list[Orders] = []
    book = OrderBook(file, ["a", "b"], changed=said.append)
    held = book.take(OrderAsk(nodes={"a": True}))
    full = tmp_path / "orders.new"
    for change in (lambda: book.take(OrderAsk(weight=7)), lambda: book.know(["b"])):
        full.symlink_to("/dev/full")
        with pytest.raises(InternalError, match=r"orders\.json: No space left on device"):
            change()
        assert said[-1] == book.now == read_orders(file) == held
    assert book.take(OrderAsk(nodes={"a": False})).nodes == (), "it is still a node of the region"
    book.take(OrderAsk(nodes={"a": True}))
    full.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device"):
        OrderBook(file, ["b"], changed=said.append)
