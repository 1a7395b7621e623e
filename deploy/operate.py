"""`skerry drain`, `undrain` and `weight`, as the command line declares them."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.where import AnyStateOption, AnyTopologyOption, running_world_meant

PartArgument = Annotated[str, typer.Argument(help="An edge, a region or a node, by its name.")]


def drain(
    part: PartArgument,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until it is idle; 0 does not wait.")
    ] = 0.0,
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Give a part of the running world nothing new; what it has goes on. Holds until `undrain`,
    also when it is started again."""
    from deploy.orders import drain

    drain(running_world_meant(topology, state), part, resting=True, say=print, wait_s=wait)


def undrain(
    part: PartArgument, topology: AnyTopologyOption = None, state: AnyStateOption = None
) -> None:
    """Take `drain` back."""
    from deploy.orders import drain

    drain(running_world_meant(topology, state), part, resting=False, say=print, wait_s=0.0)


def weight(
    region: Annotated[str, typer.Argument(help="A region.")],
    value: Annotated[
        int,
        typer.Argument(min=0, max=10_000, help="100 is usual; 0 is the topology's own again."),
    ],
    topology: AnyTopologyOption = None,
    state: AnyStateOption = None,
) -> None:
    """Give a region a share of the prompts by its weight, on every edge, from now on."""
    from deploy.orders import weigh

    weigh(running_world_meant(topology, state), region, value, say=print)
