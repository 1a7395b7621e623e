"""The steps of a rollout, taken on the systemd units of other machines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from core.errors import ConfigError
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.steps import (
    Beside,
    Heard,
    Idle,
    Kind,
    Ready,
    Replace,
    Reread,
    Rest,
    Start,
    Step,
    Stop,
    Watch,
    Weigh,
)
from deploy.ssh.channel import Done, Host, HostFailed
from deploy.ssh.hosts import Seat
from deploy.ssh.units import Place, service_name

SYSTEMCTL_S = 400
"""An edge's reload waits until its second process hears a region."""
LAST_LINES = 6
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of one process on its host. `before`: its text as it is there, None for none;
    `after`: as it is to be, None where it is not to be any more."""

    seat: Seat
    host: Host
    place: Place
    before: str | None
    after: str | None
    topology: str = ""
    """The file that `after` names."""
    topology_before: str = ""

    @property
    def service(self) -> str:
        return service_name(self.place.world, self.seat.name)

    @property
    def path(self) -> str:
        return f"{self.host.facts.units}/{self.service}"

    @property
    def changing(self) -> str:
        return self.place.before(self.service)


class At(Enum):
    """Which text of a unit."""

    BEFORE = "before"
    AFTER = "after"


class Systemd:
    """One host's manager."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._own = ("--user",) if host.facts.manager == "user" else ()

    def must(self, what: str, *words: str) -> Done:
        return self._host.must(what, "systemctl", *self._own, *words, timeout_s=SYSTEMCTL_S)

    def reread(self) -> None:
        self.must("reading the units", "daemon-reload")

    def properties(self, service: str) -> Mapping[str, str]:
        """ActiveState, MainPID, NRestarts, Result, ExecMainStatus."""
        names = "ActiveState,MainPID,NRestarts,Result,ExecMainStatus"
        done = self._host.run("systemctl", *self._own, "show", f"--property={names}", service)
        lines = (line.partition("=") for line in done.out.splitlines())
        return {key: value for key, _, value in lines}

    def last_lines(self, service: str) -> list[str]:
        """Of what it has said, but its lines about requests."""
        done = self._host.run(
            "journalctl", *self._own, "--unit", service, "--lines", "1000", "--output", "cat",
            "--no-pager",
        )  # fmt: skip
        lines = [line for line in done.out.splitlines() if "skerry.request" not in line]
        return lines[-LAST_LINES:]

    def commands(self, service: str) -> str:
        """What an operator would ask there."""
        own = " ".join(("journalctl", *self._own, "-u", service))
        return f"ssh {self._host.name} {own}"


class SshStage:
    """`units`: of all processes that the steps may name, and of those that run beside them."""

    def __init__(
        self,
        *,
        units: Mapping[str, Unit],
        asking: Asking,
        attending: Attending,
        patience: Patience,
    ) -> None:
        self._units = units
        self._asking = asking
        self._attending = attending
        self._patience = patience
        self._at = {
            name: None if unit.before is None else At.BEFORE for name, unit in units.items()
        }
        """Which of its texts a unit has on its host now."""
        self._touched: dict[str, Unit] = {}
        self._lost: set[str] = set()
        self._states: dict[str, tuple[float, Mapping[str, str]]] = {}

    def take(self, step: Step) -> None:
        self._revive()
        match step:
            case Rest() | Idle() | Heard() | Weigh() | Watch():
                self._attending.take(step)
            case Replace(names, back):
                self._replace(names, back=back)
            case Reread():
                self._reread(step)
            case Start(name):
                self._start(name)
            case Stop(name):
                self._stop(name)
            case Beside(edge, back):
                self._beside(edge, back=back)
            case Ready(names, but):
                self._ready(names, but)

    def settle(self) -> None:
        """The rollout, or its way back, is through: units are as they are to be."""
        for unit in self._touched.values():
            unit.host.remove(unit.changing)
        self._touched.clear()

    def settle_back(self) -> None:
        """The way back has been gone. What could not be put back stays marked, so that the next
        deploy sees to it."""
        for name, unit in list(self._touched.items()):
            if self._at[name] is (None if unit.before is None else At.BEFORE):
                try:
                    unit.host.remove(unit.changing)
                except HostFailed:
                    continue
                del self._touched[name]

    def _revive(self) -> None:
        """A connection that broke is made anew, once: the way back needs it. Where that fails, the
        steps that need it will say so."""
        for host in {unit.host.name: unit.host for unit in self._units.values()}.values():
            if host.name not in self._lost and not host.lives:
                try:
                    host.revive()
                except HostFailed:
                    self._lost.add(host.name)

    # ------------------------------------------------------------------ units

    def _replace(self, names: Sequence[str], *, back: bool) -> None:
        changed = [name for name in names if self._put(name, back=back)]
        for host, services in self._by_host(changed):
            systemd = Systemd(host)
            systemd.reread()
            systemd.must(f"restarting {', '.join(services)}", "restart", *services)

    def _reread(self, step: Reread) -> None:
        unit = self._units[step.router]
        if self._put(step.router, back=step.back):
            Systemd(unit.host).reread()
            topology = unit.topology_before if step.back else unit.topology
            self._asking.tell(step.router, Path(topology), mute=step.mute)

    def _start(self, name: str) -> None:
        """One that is new; or, on the way back, one that was stopped for good."""
        unit = self._units[name]
        self._put(name, back=unit.after is None)
        systemd = Systemd(unit.host)
        systemd.reread()
        systemd.must(f"enabling {unit.service}", "enable", unit.service)
        systemd.must(f"starting {unit.service}", "restart", unit.service)

    def _stop(self, name: str) -> None:
        unit = self._units[name]
        systemd = Systemd(unit.host)
        if self._at[name] is not None:
            self._mark(unit)
            systemd.must(f"stopping {unit.service}", "disable", "--now", unit.service)
            unit.host.remove(unit.path)
            self._at[name] = None
        if unit.after is not None and unit.before is not None:  # it was there, and did not run
            unit.host.write(unit.path, unit.before.encode())
            self._at[name] = At.BEFORE
        systemd.reread()

    def _beside(self, edge: str, *, back: bool) -> None:
        unit = self._units[edge]
        if not self._put(edge, back=back):
            return
        systemd = Systemd(unit.host)
        systemd.reread()
        try:
            systemd.must(f"replacing edge {edge} beside itself", "reload", unit.service)
        except HostFailed as error:
            # The first process goes on, and its unit is to say so again.
            if unit.before is not None and not back:
                unit.host.write(unit.path, unit.before.encode())
                self._at[edge] = At.BEFORE
                systemd.reread()
            raise HostFailed(f"{error}\n{self._end_of(unit)}") from error

    def _put(self, name: str, *, back: bool) -> bool:
        """Whether the unit was not as it is to be."""
        unit = self._units[name]
        at, text = (At.BEFORE, unit.before) if back else (At.AFTER, unit.after)
        if text is None or self._at[name] is at:
            return False
        self._mark(unit)
        unit.host.write(unit.path, text.encode())
        self._at[name] = at
        return True

    def _mark(self, unit: Unit) -> None:
        """Until the end of the rollout its host knows that the unit may not be what runs."""
        if unit.seat.name not in self._touched:
            unit.host.write(unit.changing, (unit.before or "").encode())
            self._touched[unit.seat.name] = unit

    def _by_host(self, names: Sequence[str]) -> Iterator[tuple[Host, list[str]]]:
        found: dict[str, list[str]] = {}
        hosts = {unit.host.name: unit.host for unit in map(self._units.__getitem__, names)}
        for name in names:
            found.setdefault(self._units[name].host.name, []).append(self._units[name].service)
        for host, services in found.items():
            yield hosts[host], services

    # ------------------------------------------------------------------ ready

    def _ready(self, names: Sequence[str], but: Sequence[str]) -> None:
        self._states.clear()
        waiting = [name for name in names if self._at[name] is not None]

        def ready() -> bool:
            waiting[:] = [name for name in waiting if not self._is_ready(self._units[name], but)]
            return not waiting

        def late() -> str:
            ends = "\n".join(self._end_of(self._units[name]) for name in waiting[:1])
            hosts = ", ".join(f"{name} on {self._units[name].seat.host}" for name in waiting)
            return f"not ready: {hosts}\n{ends}\n "

        self._asking.until(ready, self._patience.ready_s, else_=late)

    def _is_ready(self, unit: Unit, but: Sequence[str]) -> bool:
        """Raises ConfigError when it has ended."""
        state = self._state(unit)
        if state.get("ActiveState") == "failed" or state.get("NRestarts", "0") != "0":
            raise ConfigError(
                f"{unit.host.name}: {unit.seat.kind} {unit.seat.name} ended while starting "
                f"({state.get('Result', '')}, exit status {state.get('ExecMainStatus', '')})\n"
                f"{self._end_of(unit)}"
            )
        name, topology = unit.seat.name, self._asking.topology
        match unit.seat.kind:
            case Kind.EDGE:
                return self._asking.hears(topology.edge(name).url)
            case Kind.NODE:
                pid = int(state.get("MainPID") or 0)
                doors = self._asking.doors(Kind.NODE, name, but)
                return all(self._has_joined(url, name, pid) for url in doors.values())
            case _:
                (url,) = self._asking.doors(Kind.ROUTER, name).values()
                return self._asking.answers(url)

    def _state(self, unit: Unit) -> Mapping[str, str]:
        """Looked at once a second at most: each look is a program on the host."""
        at, state = self._states.get(unit.service, (0.0, {}))
        if time.monotonic() - at > LOOK_S:
            state = Systemd(unit.host).properties(unit.service)
            self._states[unit.service] = time.monotonic(), state
        return state

    def _has_joined(self, router: str, name: str, pid: int) -> bool:
        """The process that runs now, and not one before it that is not missed yet."""
        node = self._asking.node(router, name)
        return node is not None and node.alive and node.pid == pid

    def _end_of(self, unit: Unit) -> str:
        systemd = Systemd(unit.host)
        lines = systemd.last_lines(unit.service) or ["(nothing)"]
        said = "\n".join(f"    {line}" for line in lines)
        return f"  the end of `{systemd.commands(unit.service)}`:\n{said}"
