"""What types cannot say of places that nodes share: a region's `pools`, and its nodes' CUDA
devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from core.config_locate import Path
from core.config_scale import at_first, first_nodes
from core.nearest import did_you_mean
from core.types import Role

if TYPE_CHECKING:  # core.config has the types and imports this module
    from core.config import Node, Region

Found = Iterator[tuple[Path, str]]
"""Where below a region, and what."""


def pool_complaints(region: Region) -> Found:
    """What is wrong with a region's `pools` and with who is in them."""
    for seat, node in enumerate(region.nodes):
        if node.pool is not None and (why := _stranger(region, node, node.pool)):
            yield ("nodes", seat, "pool"), f"node {node.name!r} is in pool {node.pool!r}, {why}"
    for name, pool in region.pools.items():
        members = [node for node in region.nodes if node.pool == name]
        if not members:
            yield ("pools", name), f"pool {name!r} of region {region.name!r} has no node"
        always = [one for one in first_nodes(region, at_first(region)) if one.pool == name]
        if len(always) > pool.places:
            names = ", ".join(one.name for one in always)
            what = f"{len(always)} nodes of pool {name!r} run always, by their models' `least`"
            yield ("pools", name), f"{what}, and it has room for {pool.places}: {names}"
            return
        for model in dict.fromkeys(node.model for node in members):
            if why := _too_small(model, pool.places, members, always):
                yield ("pools", name), f"pool {name!r} {why}"


def _stranger(region: Region, node: Node, pool: str) -> str | None:
    """Why a node cannot be in that pool."""
    if pool not in region.pools:
        known = f"its pools: {', '.join(region.pools) or 'none'}"
        hint = did_you_mean(pool, region.pools, known, cutoff=0.5)
        return (
            f"which region {region.name!r} does not have ({hint}); "
            f"[regions.pools.{pool}] after its [[regions]] adds it"
        )
    if node.model not in region.scale:
        return (
            "but nothing says how many nodes of its model run; add "
            f"[regions.scale.{node.model}] with least = 0"
        )
    return None


def _too_small(
    model: str, places: int, members: Sequence[Node], always: Sequence[Node]
) -> str | None:
    """Why the model could never have what it needs there."""
    roles = {node.role for node in members if node.model == model}
    left = places - sum(node.model != model for node in always)
    if left < 1:
        held = ", ".join(node.name for node in always)
        return (
            f"never has a place for {model!r}: {held} always run there; give it more places, or "
            "their models least = 0"
        )
    if left < 2 and roles >= {Role.PREFILL, Role.DECODE}:
        return (
            f"has prefill and decode nodes of {model!r}, which run at the same time, and room for "
            "one of them; give it more places, or make them combined nodes"
        )
    return None


def device_complaints(region: Region) -> Found:
    """Nodes of one machine that name the same CUDA device, and may run at the same time."""
    seats = [(seat, node) for seat, node in enumerate(region.nodes) if node.gpus]
    for (_, one), (seat, other) in combinations(seats, 2):
        both = sorted(set(one.gpus) & set(other.gpus))
        if not both or _machine(region, one) != _machine(region, other):
            continue
        if one.pool is None or one.pool != other.pool or one.pool not in region.pools:
            fix = "put them into one pool with places = 1"
        elif region.pools[one.pool].places > 1:
            fix = f"pool {one.pool!r} lets several nodes run: one with places = 1 for each device"
        else:
            continue
        yield (
            ("nodes", seat, "gpus"),
            (
                f"nodes {one.name!r} and {other.name!r} both name CUDA device {both[0]} of one "
                f"machine; {fix}"
            ),
        )


def _machine(region: Region, node: Node) -> tuple[str, str]:
    return node.ssh or region.ssh or "", node.host
