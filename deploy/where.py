"""The two options that say which world a command is about, and the world they stand for."""

from __future__ import annotations

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


def topology_file(given: str) -> Path:
    """A path, or `two-regions` for deploy/topologies/two-regions.toml. Raises ConfigError."""
    from core.errors import ConfigError

    shipped = Path(__file__).parent / "topologies"
    for candidate in (Path(given), shipped / f"{given}.toml"):
        if candidate.exists() and not candidate.is_dir():
            return candidate
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.toml")))
    raise ConfigError(f"{given}: no such file, and no shipped topology (there are: {names})")


def world_of(topology: str, state: Path | None) -> World:
    """Raises ConfigError."""
    from core.config import World, load
    from deploy.state import FOLDER, folder_name

    world = load(topology_file(topology), state=state or FOLDER)
    if state is not None:
        return world
    return World(world.topology, world.path, FOLDER / folder_name(world.topology.name))
