"""Starts and stops a world's nodes after the numbers that its routers want.

A thread asks each router that scales something, ten times a second: a cold request waits for it.
A node is stopped as an operator would stop it: it takes nothing new, ends what it has, or gives it
to another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from core.config import Region, World
from core.config_scale import first_nodes
from core.errors import ConfigError
from deploy.fleet import Fleet
from deploy.inside import client as client_of
from deploy.inside import router_url
from deploy.process import Spec
from deploy.ready import RouterView, router_view

LOOK_S = 0.1
ASK_S = 1.0
LATE_S = 30.0
"""A node that was asked to end and has not after this is taken down."""


@contextmanager
def scaled(
    world: World, fleet: Fleet, spec: Callable[[str], Spec], *, say: Callable[[str], None],
    revive: bool,
) -> Iterator[None]:  # fmt: skip
    """Inside, the numbers are followed. `spec`: how a process is started now; `revive`: whether
    one that ends by itself is started again."""
    regions = [region for region in world.topology.regions if region.scale]
    if not regions:
        yield
        return
    over = threading.Event()
    numbers = Numbers(fleet, spec, say=say, revive=revive)

    def follow() -> None:
        with client_of(world) as client:
            while not over.wait(LOOK_S):
                for region in regions:
                    numbers.follow(region, _views(client, world, region))

    thread = threading.Thread(target=follow, name="scaling")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Numbers:
    """What was started and asked to end, and is not there or gone yet. `clock`: monotonic."""

    def __init__(
        self,
        fleet: Fleet,
        spec: Callable[[str], Spec],
        *,
        say: Callable[[str], None],
        revive: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._spec = spec
        self._say = say
        self._revive = revive
        self._clock = clock
        self._coming: dict[str, float] = {}
        self._leaving: dict[str, float] = {}

    def follow(self, region: Region, views: list[RouterView]) -> None:
        """Start and stop what `region` needs by what its routers say; where one sees more to do
        than another, it is heard."""
        wanted: dict[tuple[str, str], int] = {}
        why: dict[tuple[str, str], str] = {}
        for one in (one for view in views for one in view.more.wanted):
            key = str(one.model), one.role
            if one.nodes >= wanted.get(key, 0):
                wanted[key], why[key] = one.nodes, one.why
        here = {str(node.name) for view in views for node in view.nodes if node.alive}
        resting = {str(node.name) for view in views for node in view.nodes if node.draining}
        running = {node.name for node in first_nodes(region, wanted, resting)}
        for node in region.nodes:
            key = node.model, node.role
            if key in wanted and node.name not in self._fleet.reserved:
                self._keep(node.name, f"{node.model}, {why[key]}", node.name in running)
                self._tell(node.name, here)

    def _keep(self, name: str, why: str, wanted: bool) -> None:
        process, now = self._fleet.get(name), self._clock()
        if process is None:
            if wanted:
                self._start(name, why)
        elif name in self._leaving:
            if process.exit_code is not None:
                del self._leaving[name]
                self._fleet.drop(name)
                self._say(f"{name} is off")
            elif now - self._leaving[name] > LATE_S:
                process.end(0.0)
        elif not wanted:
            self._coming.pop(name, None)
            self._leaving[name] = now
            self._say(f"{name} stops ({why})")
            process.ask_to_end()

    def _start(self, name: str, why: str) -> None:
        try:
            process = self._fleet.start(self._spec(name), append=True)
        except ConfigError:
            return  # the world ends
        process.revive = self._revive
        self._coming[name] = self._clock()
        self._say(f"{name} starts ({why})")

    def _tell(self, name: str, here: set[str]) -> None:
        if name in self._coming and name in here:
            spent_s = self._clock() - self._coming.pop(name)
            self._say(f"{name} is up after {spent_s:.1f} s")


def _views(client: httpx.Client, world: World, region: Region) -> list[RouterView]:
    asked = (
        router_view(client, router_url(world.topology, router.http), timeout_s=ASK_S)
        for _, router in region.doors
    )
    return [view for view in asked if view is not None]
