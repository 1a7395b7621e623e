"""`skerry deploy UNIT --target ssh`: from a topology to units that run on its hosts."""

from __future__ import annotations

import getpass
import hashlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from core.config import World, read
from core.config_check import Complaint
from core.config_locate import line_of
from core.errors import ConfigError
from deploy import toml_write
from deploy.rollout.act import RolledBack, roll_out
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.plan import Standing, Wish
from deploy.rollout.steps import Kind, Step
from deploy.rollout.undoing import way_home
from deploy.ssh import install, intent, things
from deploy.ssh.channel import Host
from deploy.ssh.hosts import Seat, complaints, notes, seats
from deploy.ssh.install import Sending, Told, Wanted
from deploy.ssh.intent import Goal
from deploy.ssh.meeting import Found, Meeting, each, meeting, seen
from deploy.ssh.show import shown
from deploy.ssh.stage import SshStage, Unit
from deploy.ssh.stopping import Stop
from deploy.ssh.things import ModelPlace
from deploy.ssh.undoing import kept_on, undo
from deploy.ssh.units import Keeping, systemd_version
from deploy.ssh.wheels import Target, Wheelhouse, release_digest

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What the command line asks for. `wheelhouse`: a folder of wheels instead of an index."""

    unit: str
    wheelhouse: Path | None = None
    upload_models: bool = False
    dry_run: bool = False
    again: bool = False
    canary: int | None = None
    watch_s: float = 60.0
    idle_s: float = 600.0
    ready_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Aim:
    """What one host is to have. `seats`: of the unit that is deployed."""

    host: Host
    seats: tuple[Seat, ...]
    release: Wanted
    models: tuple[ModelPlace, ...]
    goal: Goal


def deploy_over_ssh(world: World, ask: Ask, cache: Path, say: Say) -> None:
    """`cache`: where wheels that were collected stay. Raises ConfigError; then the hosts are as
    they were, or the message says what is not."""
    for complaint in complaints(world.topology, ask.unit):
        raise _refusal(world, complaint)
    all_seats = seats(world.topology)
    needed = {seat.host for seat in all_seats.values() if seat.unit == ask.unit}
    house = Wheelhouse(cache, ask.wheelhouse)
    with ExitStack() as stack:
        if ask.dry_run:
            world = stack.enter_context(_untouched(world))
        met = stack.enter_context(meeting(world, all_seats, needed, say))
        stop = stack.enter_context(Stop())
        Deploy(world, ask, house, met, all_seats, stop, say).run()


class Deploy:
    """One deploy, with the hosts connected."""

    def __init__(
        self,
        world: World,
        ask: Ask,
        house: Wheelhouse,
        met: Meeting,
        all_seats: Mapping[str, Seat],
        stop: Stop,
        say: Say,
    ) -> None:
        self._world = world
        self._ask = ask
        self._house = house
        self._met = met
        self._seats = all_seats
        self._stop = stop
        self._say = say
        self._patience = Patience(ask.idle_s, ask.ready_s)
        own = [seat for seat in all_seats.values() if seat.unit == ask.unit]
        self._own = {
            name: tuple(seat for seat in own if seat.host == name)
            for name in dict.fromkeys(seat.host for seat in own)
        }

    def run(self) -> None:
        topology = self._world.topology
        for note in notes(topology, self._ask.unit):
            self._say(f"note: {note}")
        aims = self._aims()
        if not self._ask.dry_run:
            for aim in aims:
                self._lock(aim.host)
        found = self._met.found()
        things.agree_on_secrets(self._world, list(self._met.hosts.values()), self._met.place)
        goals = {aim.host.name: aim.goal for aim in aims}
        made = intent.units(self._ask.unit, self._seats, found, goals, self._met.hosts)
        with self._asking(found) as (asking, attending):
            if not self._ask.dry_run:
                undo(*self._orders, partial(attending().order, Kind.ROUTER), self._say)
            before = self._standing(made, found, goals, asking)
            steps = self._steps(made, before)
            if self._ask.dry_run:
                for line in shown(self._world, aims, made, steps, self._met.place):
                    self._say(line)
                return
            self._prepare(aims, found, release=bool(steps))
            if not steps:
                self._say(f"nothing to do: {self._ask.unit} runs this already")
                return
            self._met.look()
            asking.topology = seen(topology, self._edges(found))
            stage = SshStage(
                units=made,
                asking=asking,
                attending=attending(),
                patience=self._patience,
            )
            with kept_on(*self._orders, way_home(steps, before, topology)):
                _take(steps, before, stage, self._say)
        self._tidy(aims, found)
        self._say(f"{self._ask.unit} runs on {', '.join(aim.host.name for aim in aims)}")

    # ------------------------------------------------------------------ what is to be

    def _aims(self) -> list[Aim]:
        """Raises ConfigError for what a host lacks."""
        digests: dict[Path, str] = {}
        found: list[Aim] = []
        for name, own in self._own.items():
            host = self._met.hosts[name]
            wanted = self._wanted(host, own)
            self._look_at(host, wanted)
            place = self._met.place(host)
            models = [
                things.model_place(
                    self._world, host, place, model,
                    upload=self._ask.upload_models, digests=digests,
                )
                for model in things.models_of(self._world.topology, own)
            ]  # fmt: skip
            in_files = tuple(one for one in models if one is not None)
            topology = things.with_models_at(self._world.topology, in_files)
            text = toml_write.dump(topology)
            variables = things.uses_variables(self._world.topology, own)
            goal = Goal(
                place=place,
                keeping=Keeping(
                    host.facts.manager == "system", systemd_version(host.facts.systemd)
                ),
                release=wanted.digest,
                topology=topology,
                digest=hashlib.sha256(text.encode()).hexdigest()[:16],
                variables=(things.variables_file(place),) if variables else (),
            )
            found.append(Aim(host, own, wanted, in_files, goal))
        return found

    def _wanted(self, host: Host, own: Sequence[Seat]) -> Wanted:
        topology, ssh = self._world.topology, self._world.topology.ssh
        models = things.models_of(topology, own)
        torch = any(
            seat.kind is Kind.NODE
            and topology.models[topology.node(seat.name)[1].model].engine == "torch"
            for seat in own
        )
        target = Target.of(host.facts)
        if ssh.packages == "host":
            house, packages = self._house.own(), f"host {ssh.python}"
        else:
            extras = install.extras(topology, own, torch=torch)
            self._say(f"{host.name}: collecting wheels for {target.python} on {target.machine}")
            house = self._house.collected(target, extras, things.packages_of(topology, models))
            packages = "own"
        return Wanted(
            digest=release_digest(house, target, packages),
            house=house,
            kinds=frozenset(seat.kind for seat in own),
            torch=torch,
            packages=ssh.packages,
        )

    def _look_at(self, host: Host, wanted: Wanted) -> None:
        """Raises ConfigError where the host cannot carry it."""
        place = self._met.place(host)
        there = install.installed(host, place, wanted.digest) is not None
        lacking = () if there else install.missing(host, place, wanted.house)
        why = install.complain(host.name, host.facts, sum(one.size for one in lacking))
        if why is not None:
            raise ConfigError(why)
        if (note := install.note(host.name, host.facts)) is not None:
            self._say(f"note: {note}")

    def _lock(self, host: Host) -> None:
        who = f"{getpass.getuser()} on {socket.gethostname()}, since {time.strftime('%H:%M:%S')}"
        holder = host.lock(f"{host.facts.folder}/lock", who)
        if holder is not None:
            raise ConfigError(f"{host.name}: another deploy is under way there ({holder})")

    def _steps(self, made: Mapping[str, Unit], before: Standing) -> tuple[Step, ...]:
        wish = Wish(
            unit=self._ask.unit,
            topology=self._world.topology,
            again=self._ask.again,
            canary=self._ask.canary,
            watch_s=self._ask.watch_s,
        )
        for ran in list(before.processes.values())[:1]:
            for complaint in intent.misfitting(wish, ran.topology):
                raise _refusal(self._world, complaint)
        return intent.steps(wish, made, before)

    # ------------------------------------------------------------------ what is

    def _edges(self, found: Mapping[str, Found]) -> list[str]:
        """Those that run, and the one that is deployed."""
        return [
            edge.name
            for edge in self._world.topology.edges
            if edge.name == self._ask.unit or (edge.name in found and found[edge.name].runs)
        ]

    @contextmanager
    def _asking(
        self, found: Mapping[str, Found]
    ) -> Iterator[tuple[Asking, Callable[[], Attending]]]:
        """How the world is asked: as it was before, until it is told otherwise."""
        ran = next(
            (one.topology for one in found.values() if one.unit == self._ask.unit and one.topology),
            self._world.topology,
        )
        edges = [name for name in self._edges(found) if name in found]
        reached = World(seen(ran, edges), self._world.path, self._world.state)
        with self._met.client(self._seats) as client:
            asking = Asking(client, reached, self._stop.pause)

            def attending() -> Attending:
                return Attending(
                    client=client,
                    world=reached,
                    asking=asking,
                    patience=self._patience,
                    pause=self._stop.pause,
                    say=self._say,
                )

            yield asking, attending

    def _standing(
        self,
        made: Mapping[str, Unit],
        found: Mapping[str, Found],
        goals: Mapping[str, Goal],
        asking: Asking,
    ) -> Standing:
        processes = intent.standing(self._world.topology, made, found, goals)
        unit = self._ask.unit
        if unit not in processes or self._seats[unit].kind is Kind.EDGE:
            return Standing(processes, asking.serving())
        mute = asking.mute(unit)
        silent = len(mute) == len(self._world.topology.region(unit).doors)
        orders = asking.orders(unit, mute)
        return Standing(
            processes=processes,
            serving=asking.serving(),
            resting=frozenset((*orders.nodes, *([unit] if orders.resting else ()))),
            weights={unit: orders.weight},
            silent=frozenset([unit] if silent else ()),
            mute=frozenset(() if silent else mute),
        )

    @property
    def _orders(self) -> tuple[Host, str]:
        """Where what this deploy orders is kept."""
        host = self._met.hosts[self._seats[self._ask.unit].host]
        return host, self._met.place(host).orders(self._ask.unit)

    # ------------------------------------------------------------------ acting

    def _prepare(self, aims: Sequence[Aim], found: Mapping[str, Found], *, release: bool) -> None:
        """All that can be done before anything that runs is touched. Raises ConfigError."""
        by_host = {aim.host.name: aim for aim in aims}
        told: dict[str, Told] = {}
        files = {name: list(self._files(aim)) for name, aim in by_host.items()}

        def prepare(host: Host) -> None:
            aim = by_host[host.name]
            place, topology = aim.goal.place, aim.goal.place.topology(aim.goal.digest)
            if release:
                told[host.name] = install.install(host, place, aim.release, self._say)
                for model in aim.models:
                    self._send(host, model)
            host.write(topology, toml_write.dump(aim.goal.topology).encode())
            for what in things.put_files(host, files[host.name]):
                self._say(f"{host.name}: {what} is put there")
            if Kind.EDGE in aim.release.kinds:
                there = place.release(aim.release.digest)
                things.put_keys(host, place, there, topology, self._world)

        each([aim.host for aim in aims], prepare)
        for one in told.values():
            install.speaks(one, self._releases(found))

    def _files(self, aim: Aim) -> Iterator[things.File]:
        return things.files(self._world, aim.seats, aim.goal.place)

    def _send(self, host: Host, model: ModelPlace) -> None:
        if model.upload is not None:
            total = things.model_bytes(model.upload)
            self._say(f"{host.name}: sending model {model.model}, {total / 1e6:,.1f} MB")
            progress = Sending(f"{host.name}: model {model.model}", total, self._say)
            things.upload_model(host, model, progress)

    def _releases(self, found: Mapping[str, Found]) -> Iterator[tuple[str, Told]]:
        """Of what runs, as far as it says."""
        for one in found.values():
            digest = PurePosixPath(one.making.release).name
            told = install.installed(one.host, self._met.place(one.host), digest)
            if one.runs and told is not None:
                yield f"{one.name} on {one.host.name}", told

    def _tidy(self, aims: Sequence[Aim], found: Mapping[str, Found]) -> None:
        for aim in aims:
            keep = {aim.release.digest}
            keep |= {
                PurePosixPath(one.making.release).name
                for one in found.values()
                if one.host is aim.host
            }
            for gone in install.prune(aim.host, aim.goal.place, keep):
                self._say(f"{aim.host.name}: release {gone} is not used any more, and removed")


def _refusal(world: World, complaint: Complaint) -> ConfigError:
    line = line_of(read(world.path), complaint.path)
    return ConfigError(f"{world.path}:{line}: {complaint.what}")


@contextmanager
def _untouched(world: World) -> Iterator[World]:
    """With a state folder in which nothing that is made stays."""
    with tempfile.TemporaryDirectory() as folder:
        for path in world.state.iterdir() if world.state.exists() else ():
            Path(folder, path.name).symlink_to(path.resolve())
        yield World(world.topology, world.path, Path(folder))


def _take(steps: Sequence[Step], before: Standing, stage: SshStage, say: Say) -> None:
    """Raises RolledBack."""
    try:
        roll_out([steps], before, stage, say)
    except RolledBack:
        stage.settle_back()
        raise
    stage.settle()
