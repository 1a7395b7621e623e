"""Workers for an edge that has none, from the shelves of the other edges of this machine.

What an edge serves lies in the world's state folder, secrets with it, in files that only their
owner may read. Here it goes from folder to folder of that kind, and over no socket; names and
versions alone are told. An edge of another machine has a folder of its own there, and gets its
Workers by `skerry worker deploy`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from core.config import Edge, World
from core.errors import SkerryError
from deploy.worker.fleet import FleetError, admin_of
from edge.workers.admin_pages import Rows
from edge.workers.shelf import Card, Shelf
from edge.workers.table import table_path

Say = Callable[[str], None]


def shelved(state: Path, edges: Iterable[Edge]) -> dict[str, Card]:
    """The Workers that any of the edges serves, as the first one has each."""
    found: dict[str, Card] = {}
    for edge in edges:
        if edge.admin is not None:  # else what lies there is of an earlier life
            found = {**served_by(state, edge.name), **found}
    return found


def served_by(state: Path, edge: str) -> dict[str, Card]:
    """What is on an edge's shelf, and served."""
    shelf = _shelf(state, edge)
    if shelf is None:
        return {}
    found = {}
    for name in shelf.names():
        try:
            card = shelf.card(name)
        except SkerryError:
            continue  # damaged: another edge has it too
        if card is not None and card.active is not None:
            found[name] = card
    return found


def fill(state: Path, edge: str, others: Iterable[str], workers: Collection[str], say: Say) -> None:
    """Put `workers` on an edge's shelf in place of what it holds, each with its versions and
    secrets or not at all. For an edge that does not run."""
    sources = [other for other in others if other != edge]
    clear(state, edge)
    target = Shelf(_folder(state, edge))
    for name in sorted(workers):
        say(f"  {_copied(state, sources, target, name, edge)}")


def fill_empty(world: World, say: Say) -> None:
    """The same for the edges of a world that is about to start whose shelves are empty, where other
    edges serve something."""
    edges = [edge for edge in world.topology.edges if edge.admin is not None]
    workers = shelved(world.state, edges)
    for edge in edges:
        shelf = _shelf(world.state, edge.name)
        if workers and (shelf is None or not shelf.names()):
            say(f"edge {edge.name} has no Workers:")
            fill(world.state, edge.name, [one.name for one in edges], workers, say)


def clear(state: Path, edge: str) -> None:
    """Take all Workers from an edge's shelf, their secrets too."""
    if (shelf := _shelf(state, edge)) is not None:
        for name in shelf.names():
            shelf.forget(name)


def told(expected: Mapping[str, Card], rows: Rows) -> list[str]:
    """In words, for each Worker that is expected, whether an edge that says `rows` serves it."""
    there = {row.name: row.version for row in rows.workers}
    return [
        f"{name} {card.active} is served"
        if there.get(name) == card.active
        else f"{name} {card.active} is not served there: its log says why, `skerry worker deploy` "
        "tries again"
        for name, card in expected.items()
    ]


def rows_of(world: World, edge: Edge) -> Rows | None:
    """What the edge's host serves; None while it does not answer."""
    with admin_of(world, edge) as admin:
        try:
            return msgspec.json.decode(admin.ask("GET", "/workers"), type=Rows)
        except (FleetError, msgspec.MsgspecError):
            return None


def _copied(state: Path, sources: Iterable[str], target: Shelf, name: str, edge: str) -> str:
    """What is to be told. From the first edge that has it undamaged."""
    why = "no edge serves it any more"
    for source in sources:
        shelf, card = _shelf(state, source), served_by(state, source).get(name)
        if shelf is None or card is None:
            continue
        try:
            for version in shelf.versions(name):
                target.put(name, shelf.take(name, version))
            target.write(name, card)  # last: without it there is no Worker of that name
        except (SkerryError, OSError) as error:
            target.forget(name)
            why = str(error)
        else:
            secrets = f" with its secrets ({len(card.secrets)})" if card.secrets else ""
            return f"{name} {card.active}{secrets}, as edge {source} has it"
    return f"{name} could not be copied: {why}; deploy it again for edge {edge}"


def _folder(state: Path, edge: str) -> Path:
    return table_path(state, edge).parent


def _shelf(state: Path, edge: str) -> Shelf | None:
    """None for an edge that never had a Worker."""
    folder = _folder(state, edge)
    return Shelf(folder) if folder.is_dir() else None
