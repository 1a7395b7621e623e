"""Answers what is asked of a running world: who runs, and rollouts, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from core.config import Topology, World, load, read
from core.config_locate import line_of
from core.errors import ConfigError
from deploy import toml_write
from deploy.fleet import Fleet
from deploy.inside import client as client_of
from deploy.models import check_models
from deploy.process import Spec, describe_exit
from deploy.releases import Release, own, release_at
from deploy.rollout.act import roll_out
from deploy.rollout.asking import Asking
from deploy.rollout.control import Tell
from deploy.rollout.fit import misfits, self_contained, settled
from deploy.rollout.messages import Ask, Deploy, Said, Seen, View
from deploy.rollout.plan import Ran, Standing, Wish, names_in, plan
from deploy.rollout.stage import LocalStage, Making, Patience
from deploy.specs import Makings, names

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
        self._ending = threading.Event()
        self._files = 1

    def serve(self, ask: Ask, tell: Tell) -> None:
        """Raises ConfigError."""
        if isinstance(ask, View):
            for name in self._fleet:
                tell(self._seen(name))
            return
        if not self._turn.acquire(blocking=False):
            raise ConfigError("another rollout is under way in this world")
        try:
            self._deploy(ask, lambda line: tell(Said(line)))
        finally:
            self._turn.release()

    def spec(self, name: str) -> Spec:
        """How the process `name` has to be started now."""
        making = self._made[name]
        return self._makings.spec(making.world, name, making.release)

    def close(self) -> None:
        """The world ends: a rollout stops where it is."""
        self._ending.set()
        if self._turn.acquire(timeout=LAST_S):
            self._turn.release()

    def _deploy(self, ask: Deploy, say: Callable[[str], None]) -> None:
        release = release_at(Path(ask.release)) if ask.release else None
        after = self._described(ask.topology)
        wish = Wish(
            unit=ask.unit,
            topology=after.topology,
            release=None if release is None else str(release.folder),
            again=ask.again,
            canary=ask.canary,
            watch_s=ask.watch_s,
        )
        with client_of(self._world) as client:
            asking = Asking(client, self._world, self._ending.wait)
            before = self._standing(asking)
            steps = plan(wish, before)
            if not steps:
                say(f"nothing to do: {ask.unit} runs this already")
                return
            if ask.dry_run:
                for number, step in enumerate(steps, start=1):
                    say(f"{number}. {step}")
                return
            world = self._written(after)
            asking.topology = after.topology
            stage = LocalStage(
                fleet=self._fleet,
                makings=self._makings,
                made=self._made,
                after={name: self._to_be(name, world, release) for name in names(world)},
                world=world,
                asking=asking,
                patience=Patience(ask.idle_s, ask.ready_s),
                pause=self._ending.wait,
                say=say,
            )
            self._fleet.reserved |= names_in(steps)
            try:
                roll_out(steps, before, stage, say)
            finally:
                self._fleet.reserved.clear()
        self._world = world
        self._recorded(world.path)
        say(f"{ask.unit} runs {release or 'the release that it ran'}, {world.path.name}")

    def _to_be(self, name: str, world: World, release: Release | None) -> Making:
        made = self._made.get(name)
        return Making(world, release or (self._own if made is None else made.release))

    def _described(self, file: str) -> World:
        """The topology of a file with the addresses of the running world. Raises ConfigError with
        file and line when it does not fit."""
        if not file:
            return self._world
        given = load(Path(file), state=self._world.state)
        check_models(given)
        topology = settled(self_contained(given), self._asked, self._world.topology)
        for complaint in misfits(self._world.topology, topology):
            line = line_of(read(given.path), complaint.path)
            raise ConfigError(f"{given.path}:{line}: {complaint.what}")
        if topology == self._world.topology:
            return self._world
        return World(topology, given.path, self._world.state)

    def _written(self, described: World) -> World:
        """In a file of the run's own, so that whoever is started again later reads the same."""
        if described is self._world:
            return described
        self._files += 1
        path = self._world.path.parent / f"topology-{self._files}.toml"
        path.write_text(toml_write.dump(described.topology), encoding="utf-8")
        return load(path, state=self._world.state)

    def _standing(self, asking: Asking) -> Standing:
        weights: dict[str, int] = {}
        resting: set[str] = set()
        for region in self._world.topology.regions:
            orders = asking.orders(region.name)
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
        )

    def _seen(self, name: str) -> Seen:
        process, making = self._fleet[name], self._made[name]
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
