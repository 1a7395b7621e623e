"""`skerry`: the command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="skerry",
    help="Edges, regions and nodes that answer prompts where they have been read already.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config = typer.Typer(help="Look at topology files.", no_args_is_help=True)
app.add_typer(config, name="config")

TopologyOption = Annotated[
    str,
    typer.Option("--topology", "-t", help="A topology file, or the name of one of those shipped."),
]
StateOption = Annotated[
    Path | None, typer.Option("--state", help="State folder; by default .skerry/WORLD.")
]
EdgeOption = Annotated[
    str | None, typer.Option("--edge", help="URL of an edge; by default that of the running world.")
]
FileOption = Annotated[Path, typer.Option("--topology", help="The world's topology file.")]
FolderOption = Annotated[Path, typer.Option("--state", help="Folder of secrets and logs.")]
NameOption = Annotated[str, typer.Option("--name", help="Who of the topology this process is.")]

DEFAULT_EDGE = "http://127.0.0.1:8787"


@app.command()
def doctor(topology: TopologyOption = "two-regions") -> None:
    """Check whether this machine can run the world; one line for each finding."""
    from deploy.doctor import main as examine

    raise typer.Exit(examine(["--topology", str(topology_file(topology))]))


@app.command()
def up(topology: TopologyOption = "two-regions", state: StateOption = None) -> None:
    """Run a whole world on this machine until Ctrl-C."""
    from deploy.up import up as run

    run(topology_file(topology), state)


@app.command()
def edge(topology: FileOption, state: FolderOption, name: NameOption) -> None:
    """Run one edge process."""
    _become("edge", topology, state, name)


@app.command()
def router(topology: FileOption, state: FolderOption, name: NameOption) -> None:
    """Run the router process of one region."""
    _become("regional router", topology, state, name)


@app.command()
def node(topology: FileOption, state: FolderOption, name: NameOption) -> None:
    """Run one node: its front process and its ranks."""
    _become("regional node", topology, state, name)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; without it a conversation begins.")
    ] = None,
    edge: EdgeOption = None,
    model: Annotated[str, typer.Option(help="A model or alias.")] = "default",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length limit.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
) -> None:
    """Ask an edge and show the answer as it comes."""
    from deploy.chat import Chat

    Chat(edge or find_edge(), model, max_tokens, temperature).run(prompt)


@app.command()
def status(edge: EdgeOption = None) -> None:
    """Show regions, nodes and their load, as an edge sees them."""
    from rich.console import Console

    from deploy.status import edge_view, status_table

    Console().print(status_table(edge_view(edge or find_edge()).regions))


@config.command("check")
def config_check(file: Annotated[Path, typer.Argument(help="A topology file.")]) -> None:
    """Read a topology file and say what it describes, or what is wrong with it."""
    from core.config import load

    world = load(file, state=Path(".skerry")).topology
    nodes = sum(len(region.nodes) for region in world.regions)
    print(
        f"{file}: ok. {len(world.edges)} edges, {len(world.regions)} regions, {nodes} nodes, "
        f"models: {', '.join(world.models)}"
    )


def topology_file(given: str) -> Path:
    """A path, or `two-regions` for deploy/topologies/two-regions.toml. Raises ConfigError."""
    from core.errors import ConfigError

    shipped = Path(__file__).parent / "topologies"
    for candidate in (Path(given), shipped / f"{given}.toml"):
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.toml")))
    raise ConfigError(f"{given}: no such file, and no shipped topology (there are: {names})")


def find_edge() -> str:
    """The first edge of the world that runs in this folder, else the usual address."""
    from deploy.state import FOLDER, running

    for world in running(FOLDER):
        for url in world.edges.values():
            return url
    return DEFAULT_EDGE


def _become(module: str, topology: Path, state: Path, name: str) -> None:
    """Turn this process into `python -m MODULE`: signals and exit codes are its own."""
    command = [sys.executable, "-m", *module.split()]
    options = ["--topology", str(topology), "--state", str(state), "--name", name]
    os.execv(sys.executable, [*command, *options])


def main() -> None:
    raise SystemExit(guarded(app))


def guarded(command: Callable[[], object]) -> int:
    """Run the command line: a SkerryError is one line and exit code 2."""
    from core.errors import SkerryError

    try:
        command()
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


if __name__ == "__main__":
    main()
