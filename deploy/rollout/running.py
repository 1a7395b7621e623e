"""The running world of this machine, as the command line asks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.errors import ConfigError
from deploy.rollout.control import ask
from deploy.rollout.messages import Change, Said, Seen, View
from deploy.state import FOLDER, Current, current_of, running_folders, running_topology


def topology_of(state: Path | None, root: Path = FOLDER) -> Path:
    """The file that describes the world of `state`, or the only one that runs, as it is now. Raises
    ConfigError."""
    return running_topology(state if state is not None else next(iter(running_folders(root)), None))


def control_of(state: Path | None, root: Path = FOLDER) -> Path:
    """Where the world of `state` is asked, or the only one that runs. Raises ConfigError."""
    if state is not None:
        current = current_of(state)
        if current is None:
            raise ConfigError(f"no world runs on {state}; `skerry up --state {state}` starts one")
        return _control(current, state)
    worlds = running_folders(root)
    if len(worlds) != 1:
        if not worlds:
            raise ConfigError("no world runs here; `skerry up` starts one")
        choices = " or ".join(f"--state {folder}" for folder in worlds)
        raise ConfigError(f"{len(worlds)} worlds run here; say which one: {choices}")
    ((folder, current),) = worlds.items()
    return _control(current, folder)


def asked(what: Change, state: Path | None) -> Iterator[str]:
    """What the world says meanwhile; to who breaks it off, that the world goes on. Raises
    ConfigError with its last word when it has failed."""
    try:
        for told in ask(control_of(state), what):
            if isinstance(told, Said):
                yield told.line
    except KeyboardInterrupt:
        if not what.dry_run:
            yield "the world goes on with this all the same; `skerry status` shows what runs"
        raise


def seen(control: Path) -> list[Seen]:
    """Its processes. Raises ConfigError."""
    return [told for told in ask(control, View()) if isinstance(told, Seen)]


def seen_at(edge: str, root: Path = FOLDER) -> list[Seen]:
    """The processes of the world here that has this edge; none when it runs elsewhere."""
    for current in running_folders(root).values():
        if current.control and edge.rstrip("/") in current.edges.values():
            return seen(Path(current.control))
    return []


def _control(current: Current, folder: Path) -> Path:
    if not current.control:
        raise ConfigError(f"the world on {folder} is of an earlier release: start it again")
    return Path(current.control)
