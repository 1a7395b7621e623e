"""Answers what is asked of a running world: who runs, and rollouts, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from core.config import Topology, World, load, read
from core.config_check import Complaint
from core.config_locate import line_of
from core.errors import ConfigError
from deploy import toml_write
from deploy.digests import check_digests
from deploy.fleet import Fleet
from deploy.inside import client as client_of
from deploy.memory import no_room
from deploy.models import check_model, check_models
from deploy.ports import resolve
from deploy.process import Spec, describe_exit
from deploy.releases import Release, own, release_at
from deploy.rollout.act import roll_out
from deploy.rollout.arrivals import arrive, named, newcomers
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.control import Tell
from deploy.rollout.departures import depart, leavers
from deploy.rollout.fit import losses, misfits, self_contained, settled, with_those_of
from deploy.rollout.leftovers import forget
from deploy.rollout.messages import AddModel, Ask, Change, Deploy, RemoveModel, Said, Seen, View
from deploy.rollout.models import fresh_nodes, regions_with, with_model, without_model
from deploy.rollout.plan import Ran, Standing, Wish, names_in, plan
from deploy.rollout.stage import LocalStage, Making
from deploy.rollout.steps import Step
from deploy.rollout.undoing import kept_for_the_next_start, way_home
from deploy.specs import Makings, names
from deploy.worker.shelves import shelved

LAST_S = 5.0
"""How long the end of the world waits for a rollout under way to notice it."""


class Desk:
    """`asked`: the topology as its file has it; `world`: as it runs. `recorded` is told of the file
    that describes the world from now on."""

    def __init__(
        self,
        *,
        asked: Topology,
        world: World,
        fleet: Fleet,
        makings: Makings,
        recorded: Callable[[Path], None],
    ) -> None:
        self._asked = asked
        self._world = world
        self._fleet = fleet
        self._makings = makings
        self._recorded = recorded
        self._own = own()
        first = Making(world, self._own)
        self._made = dict.fromkeys(names(world), first)
        self._turn = threading.Lock()
        self._places = ExitStack()
        self._ending = threading.Event()
        self._files = 1

    def serve(self, ask: Ask, tell: Tell) -> None:
        """Raises ConfigError."""
        if isinstance(ask, View):
            for name in self._fleet:
                if (seen := self._seen(name)) is not None:
                    tell(seen)
            return
        if not self._turn.acquire(blocking=False):
            raise ConfigError("another rollout is under way in this world")
        try:
            self._take(ask, lambda line: tell(Said(line)))
        finally:
            self._turn.release()

    @property
    def world(self) -> World:
        """As it runs now."""
        return self._world

    @property
    def followed(self) -> World:
        """The same, with each region as its router knows it: what a rollout of another unit says of
        it has not come to pass, and nobody can start that."""
        topology = self._world.topology
        regions = tuple(
            made.world.topology.region(one.name)
            for one in topology.regions
            if (made := self._made.get(one.name)) is not None  # it is just being taken out
        )
        return replace(self._world, topology=structs.replace(topology, regions=regions))

    def spec(self, name: str) -> Spec:
        """How the process `name` has to be started now. Raises ConfigError for one that a rollout
        has taken out."""
        making = self._made.get(name)
        if making is None:
            raise ConfigError(f"no process is named {name!r} in this world")
        return self._makings.spec(making.world, name, making.release)

    def close(self) -> None:
        """The world ends: a rollout stops where it is."""
        self._ending.set()
        if self._turn.acquire(timeout=LAST_S):
            self._turn.release()
        self._places.close()

    def _take(self, ask: Change, say: Callable[[str], None]) -> None:
        match ask:
            case Deploy():
                self._deploy(ask, say)
            case AddModel():
                self._add(ask, say)
            case RemoveModel():
                self._remove(ask, say)

    def _deploy(self, ask: Deploy, say: Callable[[str], None]) -> None:
        release = release_at(Path(ask.release)) if ask.release else None
        wish = Wish(
            unit=ask.unit,
            topology=self._world.topology,
            release=None if release is None else str(release.folder),
            again=ask.again,
            canary=ask.canary,
            watch_s=ask.watch_s,
        )
        known = ask.unit in self._made
        with ExitStack() as places:
            after, asked = self._described(ask.topology, places)
            for loss in losses(ask.unit, self._ran(), after.topology):
                raise ConfigError(f"{_place(after, loss)}: {loss.what}")
            check_digests(after, say)
            if self._change([wish], after, ask, say, release):
                self._places.push(places.pop_all())
                self._asked = asked
                file = self._world.path.name
                if ask.unit in self._made:
                    same = "the release that it ran" if known else self._own
                    say(f"{ask.unit} runs {release or same}, {file}")
                else:
                    say(f"{ask.unit} is gone, {file}")

    def _add(self, ask: AddModel, say: Callable[[str], None]) -> None:
        after = replace(self._world, topology=with_model(self._world.topology, ask))
        check_model(after, ask.name)
        for node in fresh_nodes(self._world.topology, after.topology):
            why = no_room(after, node)
            if why is not None:
                raise ConfigError(why)
        regions = regions_with(after.topology, ask.name)
        edges = [edge.name for edge in after.topology.edges]
        wishes = [Wish(unit=name, topology=after.topology) for name in (*regions, *edges)]
        if self._change(wishes, after, ask, say):
            say(f"{ask.name} is served in {', '.join(regions)}")

    def _remove(self, ask: RemoveModel, say: Callable[[str], None]) -> None:
        before = self._world.topology
        after = replace(self._world, topology=without_model(before, ask.name))
        (model,) = before.models.keys() - after.topology.models.keys()
        edges = [edge.name for edge in before.edges]
        regions = regions_with(before, model)
        wishes = [Wish(unit=name, topology=after.topology) for name in (*edges, *regions)]
        if self._change(wishes, after, ask, say):
            say(f"{model} is not served any more")

    def _change(
        self,
        wishes: Sequence[Wish],
        after: World,
        ask: Change,
        say: Callable[[str], None],
        release: Release | None = None,
    ) -> bool:
        """Fulfil `wishes`, whose topology is that of `after`, one after the other. False where
        there is nothing to do, or it is only to be said."""
        going = leavers(self._world.topology, after.topology)
        everybody = (*after.topology.edges, *going[1])  # those that are to go are asked as well
        both = replace(after, topology=structs.replace(after.topology, edges=everybody))
        with client_of(both) as client:
            asking = Asking(client, self._world, self._ending.wait, ran=list(self._ran().values()))
            before = self._standing(asking)
            plans = self._plans([replace(one, topology=after.topology) for one in wishes], before)
            steps = [step for one in plans for step in one]
            if not steps:
                units = ", ".join(wish.unit for wish in wishes)
                say(f"nothing to do: {units} runs this already")
                return False
            if ask.dry_run:
                for number, step in enumerate(steps, start=1):
                    say(f"{number}. {step}")
                return False
            world = self._written(after)
            patience = Patience(ask.idle_s, ask.ready_s)
            attending = Attending(
                client=client,
                world=world,
                asking=asking,
                patience=patience,
                pause=self._ending.wait,
                say=say,
            )
            asking.topology = after.topology  # now: at an edge that is to come, nobody answers yet
            stage = LocalStage(
                fleet=self._fleet,
                makings=self._makings,
                made=self._made,
                after={name: self._to_be(name, world, release) for name in names(world)},
                asking=asking,
                attending=attending,
                patience=patience,
                say=say,
            )
            # What waits in a region that goes may wait for a node that is still to be started.
            self._fleet.reserved |= names_in(steps) - {n.name for r in going[0] for n in r.nodes}
            everywhere = structs.replace(
                after.topology, regions=(*after.topology.regions, *going[0])
            )
            try:
                with kept_for_the_next_start(world.state, way_home(steps, before, everywhere)):
                    roll_out(plans, before, stage, say)
                    self._world = world  # who follows the numbers sees it before they are free
                    forget(world, *going, self._makings, say)
            finally:
                self._fleet.reserved.clear()
        self._recorded(world.path)
        return True

    def _plans(self, wishes: Sequence[Wish], before: Standing) -> Sequence[Sequence[Step]]:
        """Raises ConfigError for a wish that cannot be."""
        was, wish = self._world.topology, wishes[0]
        come, go = newcomers(was, wish.topology), leavers(was, wish.topology)
        if any(come) and any(go):
            raise ConfigError(
                f"{named(*come)} would come and {named(*go)} would go at once: first bring what is "
                "new, with a topology that has both, then take out what is to go"
            )
        if any(come):
            return arrive(wish, *come, before)
        if any(go):
            return depart(wish, was, before)
        return [plan(wish, before) for wish in wishes]

    def _to_be(self, name: str, world: World, release: Release | None) -> Making:
        made = self._made.get(name)
        return Making(world, release or (self._own if made is None else made.release))

    def _described(self, file: str, places: ExitStack) -> tuple[World, Topology]:
        """The topology of a file with the addresses of the running world, and as it was asked for.
        `places` keeps addresses that were found for what is new. Raises ConfigError with file and
        line when it does not fit."""
        if not file:
            return self._world, self._asked
        given = load(Path(file), state=self._world.state)
        check_models(given)
        topology = settled(self_contained(given), self._asked, self._world.topology)
        for complaint in misfits(self._world.topology, topology):
            raise ConfigError(f"{_place(given, complaint)}: {complaint.what}")
        if topology == self._world.topology:
            return self._world, self._asked
        regions, edges = newcomers(self._world.topology, topology)
        fresh = resolve(
            structs.replace(topology, regions=tuple(regions), edges=tuple(edges)), places
        )
        for move in fresh.moves:
            raise ConfigError(
                f"{given.path}: {move.who}: {move.wanted} is in use: free it, or give another port"
            )
        self._makings.adopt(fresh.listeners, fresh.claims)
        asked = with_those_of(topology, self._asked)
        topology = with_those_of(topology, fresh.topology)
        return World(topology, given.path, self._world.state), asked

    def _written(self, described: World) -> World:
        """In a file of the run's own, so that whoever is started again later reads the same."""
        if described is self._world:
            return described
        self._files += 1
        path = self._world.path.parent / f"topology-{self._files}.toml"
        path.write_text(toml_write.dump(described.topology), encoding="utf-8")
        return load(path, state=self._world.state)

    def _ran(self) -> dict[str, Topology]:
        return {name: one.world.topology for name, one in self._made.items()}

    def _standing(self, asking: Asking) -> Standing:
        weights: dict[str, int] = {}
        resting: set[str] = set()
        mute: set[str] = set()
        silent: set[str] = set()
        topology = self._world.topology
        for region in topology.regions:
            lost = asking.mute(region.name)
            if len(lost) == len(region.doors):
                silent.add(region.name)
            else:
                mute |= set(lost)
            orders = asking.orders(region.name, lost)
            weights[region.name] = orders.weight
            resting |= {*orders.nodes, *([region.name] if orders.resting else ())}
        return Standing(
            processes={
                name: Ran(one.world.topology, str(one.release.folder))
                for name, one in self._made.items()
            },
            serving=asking.serving(),
            resting=frozenset(resting),
            weights=weights,
            silent=frozenset(silent),
            mute=frozenset(mute),
            shelved=frozenset(shelved(self._world.state, topology.edges)),
        )

    def _seen(self, name: str) -> Seen | None:
        """None for one that has gone meanwhile."""
        process, making = self._fleet.get(name), self._made.get(name)
        if process is None or making is None:
            return None
        release: Release = making.release
        code = process.exit_code
        return Seen(
            name=name,
            kind=process.spec.kind,
            pid=process.pid,
            release=release.version,
            folder=str(release.folder),
            topology=str(making.world.path),
            up_s=max(0.0, time.time() - process.since),
            ended="" if code is None else describe_exit(code),
        )


def _place(world: World, complaint: Complaint) -> str:
    return f"{world.path}:{line_of(read(world.path), complaint.path)}"
