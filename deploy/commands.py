"""The commands of `skerry`. Each imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.certificates import certs
from deploy.configs import config
from deploy.deploying import deploy
from deploy.model_commands import models
from deploy.operate import drain, undrain, weight
from deploy.tenants import keys, purge, usage
from deploy.where import StateOption, TopologyOption, topology_file, world_of
from deploy.worker.commands import worker

app = typer.Typer(
    name="skerry",
    help="Edges, regions and nodes that answer prompts where they have been read already.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(config, name="config")
app.add_typer(certs, name="certs")
app.add_typer(keys, name="keys")
app.add_typer(models, name="models")
app.command()(usage)
app.command()(deploy)
for _one in (drain, undrain, weight):
    app.command()(_one)
app.add_typer(worker, name="worker")
app.command()(purge)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Say which release this is.", is_eager=True)
    ] = False,
) -> None:
    if version:
        from core.release import release

        print(f"skerry {release()}")
        raise typer.Exit


EdgeOption = Annotated[
    str | None, typer.Option("--edge", help="URL of an edge; by default that of the running world.")
]
MemberStateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of secrets; by default .skerry/WORLD. Logs go to stderr."),
]
NameOption = Annotated[str, typer.Option("--name", help="Who of the topology this process is.")]

MAX_TOKENS = 512
TEMPERATURE = 0.6
"""Of `chat`: small models lose the thread at 1.0, which is what the API assumes."""


@app.command()
def doctor(topology: TopologyOption = "two-regions") -> None:
    """Check whether this machine can run the world; one line for each finding."""
    from core.config import load
    from deploy.doctor import main as examine
    from deploy.models import check_plans

    file = topology_file(topology)
    check_plans(load(file, state=Path(".skerry")))
    raise typer.Exit(examine(["--topology", str(file)]))


@app.command()
def up(topology: TopologyOption = "two-regions", state: StateOption = None) -> None:
    """Run a whole world on this machine until Ctrl-C."""
    from deploy.up import up as run

    run(topology_file(topology), state)


@app.command()
def edge(topology: TopologyOption, name: NameOption, state: MemberStateOption = None) -> None:
    """Run one edge process."""
    _become("edge", topology, state, name)


@app.command()
def router(topology: TopologyOption, name: NameOption, state: MemberStateOption = None) -> None:
    """Run the router process of one region."""
    _become("regional router", topology, state, name)


@app.command()
def node(topology: TopologyOption, name: NameOption, state: MemberStateOption = None) -> None:
    """Run one node: its front process and its ranks.

    A node whose ranks are on several hosts is started on each of them, with the usual variables:
    MASTER_ADDR and MASTER_PORT of the first one (the port above it is used too), RANK of this host
    and WORLD_SIZE, the number of hosts.
    """
    _become("regional node", topology, state, name)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; without it a conversation begins.")
    ] = None,
    edge: EdgeOption = None,
    model: Annotated[str, typer.Option(help="A model or alias.")] = "default",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Where an answer is cut off.")
    ] = MAX_TOKENS,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="0 gives the likeliest answer each time.")
    ] = TEMPERATURE,
    key: Annotated[
        str | None, typer.Option(envvar="SKERRY_KEY", help="API key, where the world wants one.")
    ] = None,
) -> None:
    """Ask an edge and show the answer as it comes."""
    from deploy.chat import Chat
    from deploy.state import first_edge

    Chat(edge or first_edge(), model, max_tokens, temperature, key).run(prompt)


@app.command()
def status(edge: EdgeOption = None) -> None:
    """Show regions, nodes and their load, as an edge sees them; plain lines into a pipe."""
    from rich.console import Console

    from deploy.answering import silent_at
    from deploy.explain import recent_lines
    from deploy.rollout.processes import process_lines
    from deploy.rollout.running import seen_at
    from deploy.served import model_lines, scales
    from deploy.state import edges_of_first
    from deploy.status import first_view, region_lines, status_lines, status_table

    base, view = first_view([edge] if edge else edges_of_first())
    if sys.stdout.isatty():
        console = Console()
        console.print(status_table(view.regions, console.width))
    else:
        print("\n".join(status_lines(view.regions)))
    scaled = ["", *model_lines(view.regions)] if scales(view.regions) else []
    processes = ["", *process_lines(view, seen_at(base), silent_at(base, [view.edge]))]
    print("\n".join([*processes, "", *region_lines(view), *scaled, "", *recent_lines(base)]))


@app.command()
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(help="The x-request-id of an answer; without it the last ones are listed."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--edge", "--url", help="URL of one; by default all that run.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Folder with the region's secret: for a distant edge."),
    ] = None,
    newest: Annotated[int, typer.Option(min=1, max=200, help="How many are listed.")] = 20,
) -> None:
    """Tell where a recent request went, why, and where its time went."""
    from deploy import explain as explained
    from deploy.state import all_edges

    bases = [url] if url else all_edges()
    secret = explained.secret_of(state)
    if request_id is None:
        table = explained.rows(explained.newest(bases, newest, secret))
        print("\n".join(explained.aligned(table, len(table[0]))))
    else:
        print("\n".join(explained.lines(explained.find(bases, request_id, secret))))


def _become(module: str, given: str, state: Path | None, name: str) -> None:
    """Turn this process into `python -m MODULE`: signals and exit codes are its own."""
    from deploy.ports import refuse_unfixed
    from deploy.process import with_sources

    world = world_of(given, state)
    refuse_unfixed(world.topology, str(topology_file(given)))
    command = [sys.executable, "-m", *module.split()]
    options = ["--topology", str(topology_file(given)), "--state", str(world.state), "--name", name]
    os.execve(sys.executable, [*command, *options], with_sources())


def run() -> int:
    """The exit code of the command line; an error of ours is one line and 2."""
    from core.errors import SkerryError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal must not end in a traceback
    try:
        app()
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
