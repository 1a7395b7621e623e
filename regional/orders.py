"""The operator's orders to a region: kept in a file of the state folder, so that a router that is
started again still knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
from aiohttp import web

from core.errors import ConfigError, InternalError, InvalidRequest, RequestError
from core.orders import ORDERS_PATH, OrderAsk, Orders, read_orders, write_orders

log = logging.getLogger("skerry.router")


class OrderBook:
    """`changed` is called with what holds, at the start and after each order."""

    def __init__(
        self,
        path: Path,
        nodes: Collection[str],
        *,
        changed: Callable[[Orders], None],
    ) -> None:
        """Raises ConfigError."""
        self._path = path
        self._nodes = self._before = frozenset(nodes)
        self._changed = changed
        self.now = read_orders(path)
        changed(self.now)
        try:
            self.know(nodes)  # who went before the last start has no orders when it comes again
        except InternalError as error:
            raise ConfigError(error.message) from error

    def know(self, nodes: Collection[str]) -> None:
        """Of the region's nodes from now on. Orders hold for those that were known before; who is
        not among them any more may be told to rest until the next change. Raises InternalError
        where that cannot be kept; then all is as it was."""
        before, now = self._nodes, frozenset(nodes)
        gone = {name: False for name in self.now.nodes if name not in before & now}
        if gone:
            self._keep(self.now.changed(OrderAsk(nodes=gone)))
        self._before, self._nodes = before, now

    def take(self, ask: OrderAsk) -> Orders:
        """Raises InvalidRequest for a node that the region does not have, InternalError where the
        order cannot be kept."""
        for name in ask.nodes:
            if name not in self._nodes | self._before:
                known = ", ".join(sorted(self._nodes))
                raise InvalidRequest(f"this region has no node {name!r}; it has: {known}")
        return self._keep(self.now.changed(ask))

    def _keep(self, orders: Orders) -> Orders:
        write_orders(self._path, orders)
        self.now = orders
        log.info("orders: %s", orders)
        self._changed(orders)
        return orders


class OrdersHttp:
    """`check` raises the refusal of a caller without the secret."""

    def __init__(self, book: OrderBook, *, check: Callable[[web.Request], None]) -> None:
        self._book = book
        self._check = check

    def routes(self) -> list[web.RouteDef]:
        return [web.get(ORDERS_PATH, self._told), web.post(ORDERS_PATH, self._given)]

    async def _told(self, http: web.Request) -> web.Response:
        self._check(http)
        return _json(self._book.now)

    async def _given(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            ask = msgspec.json.decode(await http.read(), type=OrderAsk)
        except msgspec.MsgspecError as error:
            return _refused(InvalidRequest(f"the body is no order: {error}"))
        try:
            return _json(self._book.take(ask))
        except RequestError as error:
            return _refused(error)


def _json(orders: Orders) -> web.Response:
    return web.Response(body=msgspec.json.encode(orders), content_type="application/json")


def _refused(error: RequestError) -> web.Response:
    body = msgspec.json.encode({"error": {"code": error.code, "message": error.message}})
    return web.Response(status=error.http_status, body=body, content_type="application/json")
