"""`skerry certs`, as the command line declares it."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.where import AnyStateOption, AnyTopologyOption, kept_world_meant

certs = typer.Typer(help="Certificates of a world's processes.", no_args_is_help=True)

DaysOption = Annotated[int, typer.Option(min=1, max=3650, help="How long they are good.")]
DAYS = 90


@certs.command()
def init(
    days: DaysOption = DAYS, topology: AnyTopologyOption = None, state: AnyStateOption = None
) -> None:
    """Make the world's authority and a certificate for each process, as far as they are not
    there. They are used where the topology says `[tls] inside = true`."""
    from deploy.certs import init

    init(kept_world_meant(topology, state, begins=True), days, print)


@certs.command()
def rotate(
    days: DaysOption = DAYS,
    authority: Annotated[
        bool,
        typer.Option(
            "--authority", help="Only a new authority, believed beside the old one; then rotate."
        ),
    ] = False,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Make new certificates for all. What runs takes them up within seconds; no connection
    breaks."""
    from deploy.certs import rotate

    rotate(kept_world_meant(topology, state), days, print, authority=authority)


@certs.command()
def public(
    edge: Annotated[str, typer.Option("--edge", help="The edge that is to show it.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address that callers use; may be said again."),
    ] = None,
    days: DaysOption = DAYS,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Make a certificate for an edge's callers to try https with, signed by itself. For real
    callers, name files of your authority in the edge's tls table instead."""
    from deploy.certs import public

    public(kept_world_meant(topology, state, begins=True), edge, host or ["localhost"], days, print)


@certs.command("list")
def list_certs(topology: AnyTopologyOption = None, state: AnyStateOption = None) -> None:
    """Every certificate with the days that it is good for."""
    from deploy.certs import rows

    for row in rows(kept_world_meant(topology, state)):
        print(f"{row.name:<20} {row.days_left:>5} days  {', '.join(row.hosts)}".rstrip())
