"""Composition: what one process of an edge knows of the edge's Workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar.types import ASGIApp

from core.config import World
from edge.workers.front import Front
from edge.workers.table import Entry, Table, table_path


class EdgeWorkers:
    """`of_token` is for the door: who of them asks."""

    def __init__(self, edge: str, table: Table) -> None:
        self._edge = edge
        self._table = table
        self._fronts: list[Front] = []

    def of_token(self, token: bytes) -> Entry | None:
        return self._table.of_token(token)

    def before(self, app: ASGIApp) -> ASGIApp:
        """`app`, with the Workers before it."""
        front = Front(app, self._edge, self._table)
        self._fronts.append(front)
        return front

    async def close(self) -> None:
        for front in self._fronts:
            await front.close()


@asynccontextmanager
async def open_workers(world: World, edge: str) -> AsyncIterator[EdgeWorkers | None]:
    """None for an edge without an admin address."""
    if world.topology.edge(edge).admin is None:
        yield None
        return
    table = Table(table_path(world.state, edge), world.topology.workers.domain)
    workers = EdgeWorkers(edge, table)
    try:
        yield workers
    finally:
        await workers.close()
