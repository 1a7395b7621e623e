"""A release on a host: its wheels, sent as far as the host lacks them, and an environment made of
them. What is complete stays untouched; what broke off is begun again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from core.config import Topology
from core.errors import ConfigError
from deploy.rollout.steps import Kind
from deploy.ssh.channel import Facts, Host, HostFailed
from deploy.ssh.hosts import Seat
from deploy.ssh.units import Place
from deploy.ssh.wheels import House, Wheel

TOLD_EVERY_S = 3.0
ROOM = 4
"""Disk that a release takes, as a multiple of its wheels: themselves, and what is in them."""
SPARE_BYTES = 256 << 20
SPARE_RELEASES = 2
_PROBE = (
    "import json\n"
    "from core.release import release\n"
    "from core.types import WIRE_VERSION\n"
    "import {modules}\n"
    "print(json.dumps({{'version': release(), 'wire': WIRE_VERSION}}))\n"
)
_MODULES = {
    Kind.EDGE: "edge.serving, deploy.ssh.holder, deploy.ssh.take_over",
    Kind.ROUTER: "regional.app",
    Kind.NODE: "regional.node.app",
}


class Told(msgspec.Struct, frozen=True):
    """`release.json`: what a release says of itself. `note`: what falls short in it."""

    version: str
    wire: int
    note: str = ""
    wheels: tuple[str, ...] = ()
    """Their SHA-256."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A release as a host is to have it. `kinds`: of the processes that run from it; `torch`:
    whether one of them computes with it."""

    digest: str
    house: House
    kinds: frozenset[Kind]
    torch: bool
    packages: str
    """`[ssh] packages`."""


def complain(host: str, facts: Facts, wanted_bytes: int) -> str | None:
    """Why a host cannot carry a world, and what to do. Pure."""
    if facts.system != "Linux":
        return f"{host}: it runs {facts.system}; systemd units need Linux"
    if facts.implementation != "CPython":
        return f"{host}: its Python is {facts.implementation}; wheels are for CPython"
    if not facts.systemd:
        if facts.manager == "user":
            return (
                f"{host}: no systemd answers to {facts.user}: `loginctl enable-linger "
                f"{facts.user}` there starts one for that user, or deploy as root"
            )
        return f"{host}: systemd does not answer (systemctl): this target needs it"
    if not facts.writable:
        return (
            f"{host}: {facts.user} may not write to {facts.folder}: `mkdir -p {facts.folder} && "
            f"chown {facts.user} {facts.folder}` there as root, or another [ssh] folder"
        )
    needed = wanted_bytes * ROOM + SPARE_BYTES
    if facts.free_bytes < needed:
        return (
            f"{host}: {facts.free_bytes / 1e9:.1f} GB are free at {facts.folder}, and this release "
            f"needs about {needed / 1e9:.1f} GB: make room, or give another [ssh] folder"
        )
    return None


def note(host: str, facts: Facts) -> str | None:
    """What will not be as an operator may think. Pure."""
    if not facts.linger:
        return (
            f"{host}: {facts.user}'s systemd ends with its last login: `loginctl enable-linger "
            f"{facts.user}` there keeps it, also over restarts"
        )
    return None


def extras(topology: Topology, seats: Sequence[Seat], *, torch: bool) -> frozenset[str]:
    """The parts of the project that these processes need. Pure."""
    found: set[str] = set()
    for seat in seats:
        if seat.kind is Kind.ROUTER:
            found.add("region")
        if seat.kind is Kind.NODE:
            found.add("node" if torch else "region")
            if "mooncake" in topology.node(seat.name)[1].transports:
                found.add("mooncake")
    if topology.observe.otlp is not None:
        found.add("otel")
    return frozenset(found)


def installed(host: Host, place: Place, digest: str) -> Told | None:
    """None where it is not, or not wholly."""
    text = host.read(f"{place.release(digest)}/release.json")
    try:
        return None if text is None else msgspec.json.decode(text.encode(), type=Told)
    except msgspec.MsgspecError:
        return None


def missing(host: Host, place: Place, house: House) -> list[Wheel]:
    paths = [place.wheel(one.sha256, one.file) for one in house.wheels]
    kinds = host.kinds(paths)
    return [one for one, kind in zip(house.wheels, kinds, strict=True) if not kind]


def install(host: Host, place: Place, wanted: Wanted, say: Callable[[str], None]) -> Told:
    """Raises HostFailed."""
    known = installed(host, place, wanted.digest)
    if known is not None:
        return known
    started = time.monotonic()
    _send(host, place, wanted.house, say)
    folder = place.release(wanted.digest)
    host.remove(folder)
    try:
        _make(host, place, wanted, folder)
        told = _probe(host, folder, wanted)
    except HostFailed:
        host.remove(folder)  # no half release is left behind
        raise
    why = _kernels(host, folder) if wanted.torch else ""
    if why:
        say(f"{host.name}: native kernels are not built ({why}): PyTorch computes, more slowly")
    told = Told(told.version, told.wire, why, tuple(one.sha256 for one in wanted.house.wheels))
    host.write(f"{folder}/release.json", msgspec.json.encode(told))
    say(f"{host.name}: release {wanted.digest} is installed, {time.monotonic() - started:.1f} s")
    return told


class Sending:
    """Says now and then how far it is."""

    def __init__(self, what: str, total: int, say: Callable[[str], None]) -> None:
        self._what = what
        self._total = total
        self._say = say
        self._sent = 0
        self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._sent += count
        now = time.monotonic()
        if now - self._last >= TOLD_EVERY_S and self._sent < self._total:
            self._last = now
            share = 100 * self._sent / self._total
            self._say(f"{self._what}: {share:.0f} % of {self._total / 1e6:,.1f} MB")


def _send(host: Host, place: Place, house: House, say: Callable[[str], None]) -> None:
    lacking = missing(host, place, house)
    total = sum(one.size for one in lacking)
    if lacking:
        say(
            f"{host.name}: sending {len(lacking)} of {len(house.wheels)} wheels, "
            f"{total / 1e6:,.1f} MB"
        )
    progress = Sending(host.name, total, say)
    for one in lacking:
        path = place.wheel(one.sha256, one.file)
        host.write(path, house.path(one), sha256=one.sha256, sent=progress)


def _make(host: Host, place: Place, wanted: Wanted, folder: str) -> None:
    facts, python = host.facts, host.python
    wheels = [place.wheel(one.sha256, one.file) for one in wanted.house.wheels]
    flags = ("install", "--no-index", "--no-deps", "--quiet", "--no-input")
    if wanted.packages == "host":
        if not facts.pip:
            raise HostFailed(f'{host.name}: {python} has no pip, which `packages = "host"` needs')
        host.must("making an environment", python, "-m", "venv", "--without-pip", folder)
        minor = ".".join(facts.python.split(".")[:2])
        seen = "\n".join(facts.packages) + "\n"
        host.write(f"{folder}/lib/python{minor}/site-packages/host.pth", seen.encode())
        pip = [python, "-m", "pip", "--python", f"{folder}/bin/python"]
    else:
        if not facts.venv:
            raise HostFailed(
                f"{host.name}: {python} cannot make environments (Debian: apt-get install "
                "python3-venv)"
            )
        host.must("making an environment", python, "-m", "venv", folder)
        pip = [f"{folder}/bin/python", "-m", "pip"]
    host.must("installing the wheels", *pip, *flags, *wheels, timeout_s=900)


def _probe(host: Host, folder: str, wanted: Wanted) -> Told:
    """Whether all can be imported that is to run from it, and what it calls itself."""
    modules = ", ".join(_MODULES[kind] for kind in sorted(wanted.kinds))
    code = _PROBE.format(modules=modules + (", torch" if wanted.torch else ""))
    done = host.must("the release", f"{folder}/bin/python", "-P", "-c", code, timeout_s=120)
    try:
        return msgspec.json.decode(done.out.encode(), type=Told)
    except msgspec.MsgspecError as error:
        raise HostFailed(f"{host.name}: the release says {done.last!r}") from error


def _kernels(host: Host, folder: str) -> str:
    """Why they are not built; "" when they are."""
    done = host.run(f"{folder}/bin/python", "-P", "-m", "kernels.cpu.build", timeout_s=300)
    return done.last if done.code else ""


def speaks(told: Told, others: Iterator[tuple[str, Told]]) -> None:
    """The releases of one world speak one wire. Raises ConfigError."""
    for name, other in others:
        if other.wire != told.wire:
            raise ConfigError(
                f"this release speaks wire {told.wire}, and {name} runs one of wire {other.wire}: "
                "they cannot serve side by side; deploy a world of its own with it"
            )


def prune(host: Host, place: Place, keep: Collection[str]) -> list[str]:
    """Remove releases that no unit (`keep`) and no process uses, but for two: a way back to those
    costs nothing then. Wheels go with the last release of them. The names of what went."""
    running = host.run("ps", "-eo", "args")
    if running.code:
        return []
    folder = f"{place.root}/releases"
    found = host.run("ls", "-1t", folder).out.split()  # the newest first
    spare = [one for one in found if one not in keep and f"{folder}/{one}/" not in running.out]
    gone = spare[SPARE_RELEASES:]
    if gone:
        host.remove(*(f"{folder}/{one}" for one in gone))
        used: set[str] = set()
        for one in found:
            told = None if one in gone else installed(host, place, one)
            used |= set(told.wheels) if told is not None else set()
        wheels = f"{place.root}/wheels"
        host.remove(*(f"{wheels}/{one}" for one in host.names(wheels) if one not in used))
    return gone
