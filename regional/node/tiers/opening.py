"""From a node's configuration to its tiers. One that cannot be used is named and left out."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import Node, World
from core.errors import ConfigError
from core.kv.tiers.host import HostSlots
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.shape import Shape
from core.kv.tiers.shelf import Shelf
from core.kv.tiers.slab import open_slab, remove_foreign, slab_name
from core.kv.tiers.slots import Slots
from regional.node.pool import Pool
from regional.node.tiers.node_tiers import NodeTiers
from regional.node.tiers.pool_tiers import HOST, PoolTiers
from regional.node.tiers.tier_log import TierLog
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.tiers")


@dataclass(frozen=True, slots=True)
class TierSetup:
    """What a node is told of its tiers; each is of all its pools together. `folder` None: no disk
    tier."""

    node: str
    secret: bytes
    host_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None

    @property
    def wanted(self) -> bool:
        return bool(self.host_bytes or self.folder)


NO_TIERS = TierSetup("", b"")


def tier_setup(world: World, node: Node) -> TierSetup:
    """Raises ConfigError when the secret of a disk tier is missing."""
    disk = node.disk_tier
    if disk is None and not node.host_tier_bytes:
        return NO_TIERS
    return TierSetup(
        node=node.name,
        secret=world.secret("tiers"),
        host_bytes=node.host_tier_bytes,
        disk_bytes=disk.bytes if disk is not None else 0,
        folder=world.tier_folder(node),
    )


async def open_tiers(
    setup: TierSetup,
    pools: Sequence[Pool],
    fingerprint: bytes,
    tell: Callable[[pb.NodeMessage], None],
) -> NodeTiers:
    """Reads what the disk has; does not raise for a disk that cannot be used."""
    opened: dict[int, PoolTiers] = {}
    for pool in pools if setup.wanted else ():
        if len(pool.receiving.hosts) > 1:
            log.error("pool %d has no tiers: its ranks are on several hosts", pool.number)
            continue
        memory, keyring = pool.sending.memory, Keyring(setup.secret)
        shape = Shape.of(fingerprint, memory.geometries)
        told = TierLog(pool.number, tell)
        shelves: list[Shelf] = []
        if setup.host_bytes:
            host = HostSlots(shape, setup.host_bytes // len(pools))
            shelves.append(_shelf(HOST, host, told))
        if setup.folder is not None:
            slab = await _slab(setup, setup.folder, pool.number, len(pools), shape, keyring)
            if slab is not None:
                shelves.append(_shelf("disk", slab, told))
        if shelves:
            opened[pool.number] = PoolTiers(
                pool, shape, fingerprint, shelves=shelves, known=told,
                owner=keyring.tag, clock=time.monotonic,
            )  # fmt: skip
    return NodeTiers(opened)


async def _slab(
    setup: TierSetup, folder: Path, pool: int, pools: int, shape: Shape, keyring: Keyring
) -> Slots | None:
    path = folder / slab_name(setup.node, pool, shape)
    holder = f"node {setup.node} (pid {os.getpid()})"

    def open_it() -> Slots:
        foreign = remove_foreign(path)
        most_bytes = setup.disk_bytes // pools
        return open_slab(path, keyring, shape, most_bytes, holder, foreign=foreign)

    try:
        slab = await asyncio.to_thread(open_it)
    except ConfigError as error:
        log.error("the disk tier is off: %s", error)
        return None
    if not slab.count:
        log.error("the disk tier is off: %d bytes are too few for a block", setup.disk_bytes)
        slab.close()
        return None
    found = slab.found()
    log.info(
        "disk tier %s: %d of %d blocks; left out: %d foreign, %d damaged",
        path, len(found.kept), slab.count, found.foreign, found.damaged,
    )  # fmt: skip
    return slab


def _shelf(name: str, slots: Slots, told: TierLog) -> Shelf:
    return Shelf(name, slots, gained=told.gained, lost=told.lost)
