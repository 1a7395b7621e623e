"""`skerry worker`, as the command line declares it. Each command imports what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.where import AnyStateOption, AnyTopologyOption, running_world_meant

worker = typer.Typer(
    help="Workers: scripts at the edge, written for Cloudflare's runtime.", no_args_is_help=True
)
secret = typer.Typer(help="Secrets of a Worker.", no_args_is_help=True)
worker.add_typer(secret, name="secret")

FolderOption = Annotated[
    Path, typer.Option("--cwd", help="The project's folder, with wrangler's configuration.")
]
EnvOption = Annotated[
    str | None, typer.Option("--env", "-e", help="An environment of the configuration.")
]
TenantOption = Annotated[
    str,
    typer.Option(help="The tenant that the Worker acts for: whose budget its questions count in."),
]
NameArgument = Annotated[str, typer.Argument(help="The Worker's name.")]
HERE = Path()


@worker.command()
def setup() -> None:
    """Install workerd and esbuild, once; `dev` and `deploy` do it by themselves."""
    from edge.workers import tools

    if tools.installed():
        print(f"workerd and esbuild are installed in {tools.folder()}")
    tools.install(_note)


@worker.command()
def new(
    name: NameArgument,
    python: Annotated[bool, typer.Option("--python", help="In Python, not in TypeScript.")] = False,
    template: Annotated[
        str | None, typer.Option(help="Which of the examples to begin with; by default a chat.")
    ] = None,
) -> None:
    """Make a folder with a Worker that works."""
    from deploy.worker.new import create

    create(name, template or ("chat-python" if python else "chat-typescript"))


@worker.command()
def dev(
    folder: FolderOption = HERE,
    env: EnvOption = None,
    tenant: TenantOption = "",
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Serve the project on the first edge of a running world, again with each change, until
    Ctrl-C."""
    from deploy.worker.dev import dev

    dev(folder, env, running_world_meant(topology, state), tenant)


@worker.command()
def deploy(
    folder: FolderOption = HERE,
    env: EnvOption = None,
    tenant: TenantOption = "",
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Serve the project on every edge, or on none where one cannot."""
    from deploy.worker.act import deploy

    deploy(folder, env, running_world_meant(topology, state), tenant)


@worker.command()
def versions(
    name: NameArgument, topology: AnyTopologyOption = None, state: AnyStateOption = None
) -> None:
    """What was served when, and what is kept."""
    from deploy.worker.act import versions

    versions(name, running_world_meant(topology, state))


@worker.command()
def rollback(
    name: NameArgument,
    version: Annotated[
        str | None, typer.Argument(help="A kept version; by default the one before.")
    ] = None,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Serve an earlier version again, on every edge."""
    from deploy.worker.act import rollback

    rollback(name, version, running_world_meant(topology, state))


@worker.command("list")
def list_workers(topology: AnyTopologyOption = None, state: AnyStateOption = None) -> None:
    """Every Worker, whose it is, and how it is reached."""
    from deploy.worker.act import listing

    listing(running_world_meant(topology, state))


@worker.command()
def tail(
    name: NameArgument,
    lines: Annotated[int, typer.Option(min=0, max=1000, help="How many earlier ones.")] = 20,
    follow: Annotated[bool, typer.Option(help="Go on until Ctrl-C.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Show what a Worker says, and each request with its end, on all edges."""
    from deploy.worker.tail import tail

    tail(running_world_meant(topology, state), name, lines=lines, follow=follow, as_json=as_json)


@worker.command()
def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Take a Worker away, with its versions and secrets. What it kept in namespaces stays."""
    from deploy.worker.act import check, delete

    world = running_world_meant(topology, state)
    if not yes:
        check(name, world)
        typer.confirm(f"Delete the Worker {name!r} on every edge?", abort=True)
    delete(name, world)


@secret.command("put")
def put_secret(
    key: Annotated[str, typer.Argument(help="What `env` calls it.")],
    name: Annotated[str, typer.Option("--name", help="The Worker's name.")],
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Give a Worker a secret, read from standard input; it is started again with it."""
    from deploy.worker.act import check, set_secret

    world = running_world_meant(topology, state)
    if is_terminal():
        check(name, world)
        value = typer.prompt("The secret", hide_input=True)
    else:
        value = sys.stdin.read().removesuffix("\n")
    set_secret(name, key, value, world)


@secret.command("delete")
def delete_secret(
    key: Annotated[str, typer.Argument(help="What `env` calls it.")],
    name: Annotated[str, typer.Option("--name", help="The Worker's name.")],
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Take a secret away."""
    from deploy.worker.act import set_secret

    set_secret(name, key, None, running_world_meant(topology, state))


@secret.command("list")
def list_secrets(
    name: Annotated[str, typer.Option("--name", help="The Worker's name.")],
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """The names of a Worker's secrets."""
    from deploy.worker.act import secrets

    secrets(name, running_world_meant(topology, state))


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _note(line: str) -> None:
    print(line, file=sys.stderr)
