"""A namespace leaves a state folder: the slabs of nodes that do not run, queues of routers that do
not."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from core.config import World
from core.errors import ConfigError
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.shred import shred_file
from core.purge import FilesPurged, SlabPurged
from regional.queue.store import Store

log = logging.getLogger("skerry.tiers")


def purge_files(world: World, namespace: str, *, queues: bool) -> FilesPurged:
    """`queues`: no router has its queue open. Raises ConfigError."""
    slabs: list[SlabPurged] = []
    in_use = 0
    for path in slab_files(world):
        try:
            blocks = shred_file(path, Keyring(world.secret("tiers")), namespace)
        except ConfigError:
            in_use += 1
        except OSError as error:
            slabs.append(SlabPurged(path=str(path), error=error.strerror or str(error)))
        else:
            slabs.append(SlabPurged(path=str(path), blocks=blocks))
    batches = sum(_queue(path, namespace) for path in _queues(world)) if queues else 0
    return FilesPurged(slabs=tuple(slabs), in_use=in_use, batches=batches)


def slab_files(world: World) -> Iterator[Path]:
    """Those of the topology's nodes that lie on this machine."""
    nodes = [node for region in world.topology.regions for node in region.nodes]
    folders = {folder for node in nodes if (folder := world.tier_folder(node)) is not None}
    for folder in sorted(folders):
        yield from sorted(folder.glob("*.slab"))


def _queues(world: World) -> list[Path]:
    return sorted(world.state.glob("queue-*.sqlite"))


def _queue(path: Path, namespace: str) -> int:
    try:
        store = Store(path)
        try:
            return store.purge(namespace)
        finally:
            store.close()
    except sqlite3.Error as error:
        raise ConfigError(f"{path}: {error}") from error
