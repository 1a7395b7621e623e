"""The two options that say which world a command is about, and the world they stand for."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # `skerry --help` reads this file and must be quick
    from core.config import World

TopologyOption = Annotated[
    str,
    typer.Option("--topology", "-t", help="A topology file, or the name of one of those shipped."),
]
StateOption = Annotated[
    Path | None, typer.Option("--state", help="State folder; by default .skerry/WORLD.")
]


AnyTopologyOption = Annotated[
    str | None,
    typer.Option(
        "--topology", "-t",
        help="A topology file, or the name of one of those shipped; by default that of the "
        "running world.",
    ),
]  # fmt: skip
AnyStateOption = Annotated[
    Path | None, typer.Option("--state", help="State folder; by default that of the running world.")
]
DEFAULT = "two-regions"
SHIPPED = Path(__file__).parent / "topologies"


def topology_file(given: str) -> Path:
    """A path, or `two-regions` for deploy/topologies/two-regions.toml. Raises ConfigError."""
    from core.errors import ConfigError

    for candidate in (Path(given), SHIPPED / f"{given}.toml"):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    names = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.toml")))
    raise ConfigError(f"{given}: no such file, and no shipped topology (there are: {names})")


def world_of(topology: str, state: Path | None) -> World:
    """Raises ConfigError."""
    from core.config import World, load
    from deploy.state import FOLDER, folder_name

    world = load(topology_file(topology), state=state or FOLDER)
    if state is not None:
        return world
    return World(world.topology, world.path, FOLDER / folder_name(world.topology.name))


def world_meant(topology: str | None, state: Path | None) -> World:
    """The world of the options that are given: of a state folder alone the one that runs there or
    ran there last. Without any the one that runs, else the default. Raises ConfigError where
    several run."""
    from core.config import load
    from core.errors import ConfigError
    from deploy.state import FOLDER, current_of, last_topology, running_folders

    if topology is None and state is None:
        worlds = running_folders(FOLDER)
        if len(worlds) > 1:
            choices = " or ".join(f"--state {folder}" for folder in worlds)
            raise ConfigError(f"{len(worlds)} worlds run here; say which one: {choices}")
        state = next(iter(worlds), None)
    if topology is None and state is not None:
        current = current_of(state)
        file = last_topology(state) if current is None else current.topology
        if file:
            return load(Path(file), state=state)
    return world_of(topology or DEFAULT, state)


def kept_world_meant(topology: str | None, state: Path | None, *, begins: bool = False) -> World:
    """The same, for what is kept in a state folder whether its world runs or not: where nobody
    names one and none runs, standard error says which it is. `begins`: something may be kept there
    for the first time. Raises ConfigError where nothing is."""
    from core.errors import ConfigError

    world = world_meant(topology, state)
    if topology is not None or state is not None or not is_only_the_default(world):
        return world
    name = world.topology.name
    if not begins and not world.state.is_dir():
        raise ConfigError(
            f"no world runs here, and the world {name!r} has no folder {world.state}; name one "
            "with -t or --state"
        )
    print(f"no world runs here: this is the world {name!r} in {world.state}", file=sys.stderr)
    return world


def running_world_meant(topology: str | None, state: Path | None) -> World:
    """The same, for what is asked of processes: one that is not named has to run. Raises
    ConfigError."""
    from core.errors import ConfigError
    from deploy.state import FOLDER, current_of, running_folders

    if topology is None and state is not None and current_of(state) is None:
        raise ConfigError(f"no world runs on {state}; `skerry up --state {state}` starts one")
    if topology is None and state is None and not running_folders(FOLDER):
        raise ConfigError("no world runs here; `skerry up` starts one")
    return world_meant(topology, state)


def is_only_the_default(world: World) -> bool:
    """Whether nobody named `world`, and none runs where it would be."""
    from deploy.state import FOLDER, current_of, folder_name

    return (
        world.path == (SHIPPED / f"{DEFAULT}.toml").resolve()
        and world.state == FOLDER / folder_name(world.topology.name)
        and current_of(world.state) is None
    )


def options_for(topology: Path, name: str, state: Path) -> str:
    """The options that lead a command to the world `name` of a topology file, kept in `state`; a
    blank before each, nothing where the defaults do."""
    from deploy.state import FOLDER, folder_name

    words = ""
    if topology.resolve().parent != SHIPPED.resolve():
        words += f" -t {shlex.quote(str(topology))}"
    elif topology.stem != DEFAULT:
        words += f" -t {topology.stem}"
    if state.resolve() != (FOLDER / folder_name(name)).resolve():
        words += f" --state {shlex.quote(os.path.relpath(state))}"
    return words
