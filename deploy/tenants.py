"""`skerry keys`, `usage` and `purge`, as the command line declares them; what they do lies in
`deploy.keys`, `deploy.usage` and `deploy.purge`, imported when they run.

They work on the state folder, whether the world runs or not; edges see a changed key file within a
second. A key is said on standard output and the rest on standard error, so that
`KEY=$(skerry keys create --tenant NAME)` works.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deploy.where import AnyStateOption, AnyTopologyOption, kept_world_meant, world_meant

keys = typer.Typer(help="API keys of a world's tenants.", no_args_is_help=True)


class By(StrEnum):
    """What makes a line of usage."""

    TENANT = "tenant"
    MODEL = "model"
    DAY = "day"
    WORKER = "worker"


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose it is: a name under [tenants].")],
    label: Annotated[str, typer.Option(help="A word for lists: where the key is used.")] = "",
    days: Annotated[int | None, typer.Option(min=1, help="It expires after so many days.")] = None,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Make a key and show it, this once: only its digest is kept."""
    from deploy.keys import create

    create(world_meant(topology, state), tenant, label, days)


@keys.command("list")
def list_keys(topology: AnyTopologyOption = None, state: AnyStateOption = None) -> None:
    """Every key that was made: ID, tenant, state, date, label."""
    import time

    from deploy.keys import book_of, listing

    print("\n".join(listing(book_of(kept_world_meant(topology, state)), time.time())))


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's ID, as `list` shows it.")],
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Make a key worthless. Edges of this state folder refuse it within a second, edges that
    follow one of them within five."""
    from deploy.keys import revoke

    revoke(kept_world_meant(topology, state), key)


@keys.command()
def export(topology: AnyTopologyOption = None, state: AnyStateOption = None) -> None:
    """Write all records to standard output: digests and revocations, no keys."""
    from deploy.keys import export

    export(kept_world_meant(topology, state))


@keys.command("import")
def import_keys(
    file: Annotated[Path, typer.Argument(help="What `export` wrote elsewhere; - reads stdin.")],
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Add the records of another world or machine. What is known stays; a revocation wins."""
    from deploy.keys import bring_in

    bring_in(kept_world_meant(topology, state, begins=True), file)


def usage(
    by: Annotated[By, typer.Option(help="What makes a line.")] = By.TENANT,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, exact.")] = False,
    since: Annotated[str, typer.Option(help="First day, YYYY-MM-DD (UTC).")] = "",
    until: Annotated[str, typer.Option(help="Last day.")] = "",
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Add up the usage ledger, with the topology's prices."""
    from deploy.usage import show

    show(kept_world_meant(topology, state), by, as_csv=as_csv, since=since, until=until)


def purge(
    tenant: Annotated[str, typer.Argument(help="A name under [tenants], or `anonymous`.")],
    shared: Annotated[
        bool, typer.Option("--shared", help="Also where other tenants share its namespace.")
    ] = False,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Leave nothing of a tenant's prompts and answers: what runs is ended, queues, caches, memory
    and disks of all nodes let go of it. Keys and the usage ledger stay."""
    from deploy.purge import purge

    raise typer.Exit(purge(kept_world_meant(topology, state), tenant, shared=shared))
