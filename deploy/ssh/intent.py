"""What a deploy is to make of what runs: units as they are to be, and the steps that lead there.
Pure, but for what it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from core.address import split_address
from core.config import Topology
from core.config_check import Complaint
from core.errors import ConfigError
from deploy.rollout.fit import misfits
from deploy.rollout.plan import Ran, Standing, Wish, affected, plan
from deploy.rollout.steps import Kind, Ready, Replace, Start, Step
from deploy.ssh.channel import Host
from deploy.ssh.hosts import Seat
from deploy.ssh.meeting import Found, stopping
from deploy.ssh.stage import Unit
from deploy.ssh.units import Keeping, Making, Place, Wants, render

WISHED, OTHER = "wished", "other"
"""What `plan` compares releases by: whether a unit is as this deploy would make it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What one host is to have. `topology`: as its processes are to read it, from the file
    `place.topology(digest)`."""

    place: Place
    keeping: Keeping
    release: str
    topology: Topology
    digest: str
    variables: tuple[str, ...] = ()
    """Files of variables that its units read."""


def wants(topology: Topology, seat: Seat, goal: Goal) -> Wants:
    """What the unit of a process needs beside the usual."""
    if seat.kind is Kind.EDGE:
        edge = topology.edge(seat.name)
        return Wants(
            workers=edge.admin is not None,
            low_port=split_address(edge.listen)[1] < 1024,
            environment_files=goal.variables,
        )
    if seat.kind is Kind.ROUTER:
        return Wants(environment_files=goal.variables)
    _, node = topology.node(seat.name)
    tier = node.disk_tier
    environment = {"OMP_NUM_THREADS": str(node.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if node.device == "cuda":  # its home folder is read-only to it
        environment["TRITON_CACHE_DIR"] = f"{goal.place.state}/cache/triton"
    return Wants(
        devices=node.device == "cuda" or "mooncake" in node.transports,
        environment=environment,
        environment_files=goal.variables,
        folders=(tier.path,) if tier is not None and tier.path.startswith("/") else (),
    )


def text_of(seat: Seat, goal: Goal, topology_file: str) -> str:
    """The unit of `seat` with the release of the goal and this topology file."""
    making = Making(goal.place.release(goal.release), topology_file)
    return render(seat, making, goal.place, goal.keeping, wants(goal.topology, seat, goal))


def units(
    unit: str,
    seats: Mapping[str, Seat],
    found: Mapping[str, Found],
    goals: Mapping[str, Goal],
    hosts: Mapping[str, Host],
) -> dict[str, Unit]:
    """Of all processes of the edge or region `unit`, those too that are not to be any more. Raises
    ConfigError for one that runs on another host than it is to."""
    made: dict[str, Unit] = {}
    for seat in seats.values():
        if seat.unit != unit:
            continue
        goal, was = goals[seat.host], found.get(seat.name)
        if was is not None and was.host.name != seat.host:
            raise ConfigError(
                f"{seat.name} is on {was.host.name} and is to be on {seat.host}: stop it there "
                f"first, {stopping(was)}"
            )
        file = goal.place.topology(goal.digest)
        made[seat.name] = Unit(
            seat=seat,
            host=hosts[seat.host],
            place=goal.place,
            before=None if was is None else was.before,
            after=text_of(seat, goal, file),
            topology=file,
            topology_before="" if was is None else was.making.topology,
        )
    for name, one in found.items():
        if one.unit == unit and name not in seats:
            seat = Seat(name, Kind.NODE, unit, one.host.name)
            place = next(iter(goals.values())).place
            made[name] = Unit(
                seat, one.host, Place(one.host.facts.folder, place.world), one.before, None
            )
    return made


def standing(
    topology: Topology,
    made: Mapping[str, Unit],
    found: Mapping[str, Found],
    goals: Mapping[str, Goal],
) -> dict[str, Ran]:
    """What runs of a unit, as `plan` takes it. What has failed, and what an earlier deploy left in
    between, is not as wished."""
    ran: dict[str, Ran] = {}
    kept: dict[tuple[str, str], Topology] = {}
    for name, unit in made.items():
        was = found.get(name)
        if was is None or not was.runs:
            continue
        goal = goals.get(unit.seat.host)
        key = (was.host.name, was.making.topology)
        if key not in kept:
            kept[key] = _comparable(was.topology or topology, topology, goal)
        wished = (
            goal is not None
            and unit.after is not None
            and was.topology is not None
            and not was.changing
            and was.text == text_of(unit.seat, goal, was.making.topology)
        )
        ran[name] = Ran(kept[key], WISHED if wished else OTHER)
    return ran


def steps(wish: Wish, made: Mapping[str, Unit], before: Standing) -> tuple[Step, ...]:
    """As for a world that runs; what does not run yet is started. Raises ConfigError."""
    wish_now = Wish(wish.unit, wish.topology, WISHED, wish.again, wish.canary, wish.watch_s)
    doors = [n for n, one in made.items() if one.seat.kind in (Kind.EDGE, Kind.ROUTER)]
    if all(name in before.processes for name in doors):
        return plan(wish_now, before)
    if wish.canary is not None:
        raise ConfigError(f"{wish.unit} does not run: there is nothing to compare a canary with")
    names = [name for name, one in made.items() if one.after is not None]
    changed = [name for name in affected(names, wish_now, before) if name in before.processes]
    fresh = [name for name in names if name not in before.processes]
    return (
        *((Replace(tuple(changed)),) if changed else ()),
        *(Start(name) for name in fresh),
        Ready((*changed, *fresh)),
    )


def misfitting(wish: Wish, before: Topology) -> Iterator[Complaint]:
    """What cannot be taken in without a stop, of the unit and of the world."""
    known = {region.name for region in before.regions} | {edge.name for edge in before.edges}
    if wish.unit not in known:
        return
    places = [("edges", n) for n, one in enumerate(wish.topology.edges) if one.name == wish.unit]
    places += [
        ("regions", n) for n, one in enumerate(wish.topology.regions) if one.name == wish.unit
    ]
    for one in misfits(before, wish.topology):
        if one.path[:2] in places or one.path in (("secrets",), ("tls",)):
            yield one


def _comparable(ran: Topology, topology: Topology, goal: Goal | None) -> Topology:
    """`ran` as it would be in the operator's file: where its host has a model is no change."""
    if goal is None:
        return ran
    models = {
        name: replace(model, source=topology.models[name].source)
        if name in topology.models
        and name in goal.topology.models
        and model.source == goal.topology.models[name].source
        else model
        for name, model in ran.models.items()
    }
    return replace(ran, models=models)
