"""What an edge or a region leaves in a world when it has gone, and is not to find when one of its
name comes again: orders of the operator, ports, and Workers with their secrets."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress

from core.config import Edge, Region, World
from core.orders import orders_file
from deploy.specs import Makings
from deploy.worker.shelves import served_by, shelved
from edge.workers.table import table_path


def forget(
    world: World,
    regions: Iterable[Region],
    edges: Iterable[Edge],
    makings: Makings,
    say: Callable[[str], None],
) -> None:
    """`world`: without them. A region's queue stays, since answers lie in it that may be asked for
    when it comes again; so do an edge's Workers where no other edge has one of them."""
    for region in regions:
        for name, router in region.doors:
            _unordered(world, name)
            makings.free((router.http, router.grpc))
    others = shelved(world.state, world.topology.edges)
    for edge in edges:
        _unordered(world, edge.name)
        makings.free(address for address in (edge.listen, edge.admin) if address is not None)
        if alone := sorted(served_by(world.state, edge.name).keys() - others.keys()):
            say(f"  the Workers of edge {edge.name} stay: no other edge has {', '.join(alone)}")
        else:
            shutil.rmtree(table_path(world.state, edge.name).parent, ignore_errors=True)


def _unordered(world: World, name: str) -> None:
    with suppress(OSError):
        orders_file(world.state, name).unlink(missing_ok=True)
