"""The systemd unit of each process, as text. Pure.

A unit says all by itself: which release, which topology, which state folder. What ran before can be
put back by putting its text back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from deploy.rollout.steps import Kind
from deploy.ssh.hosts import Seat

FILES = 1 << 20
"""Open files that a process may have: an edge needs two for each request."""
STOP_S = {Kind.EDGE: 40, Kind.ROUTER: 25, Kind.NODE: 25}
"""From SIGTERM to SIGKILL: what a process lets its answers go on for, and the way out."""
_FACT = re.compile(r"^(?P<key>Release|Topology|Unit)=(?P<value>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where things lie on a host. `root` is `[ssh] folder` there, `world` the world's name."""

    root: str
    world: str

    @property
    def home(self) -> str:
        return f"{self.root}/{self.world}"

    @property
    def state(self) -> str:
        return f"{self.home}/state"

    def topology(self, digest: str) -> str:
        return f"{self.home}/topologies/{digest}.toml"

    def release(self, digest: str) -> str:
        return f"{self.root}/releases/{digest}"

    def wheel(self, sha256: str, name: str) -> str:
        return f"{self.root}/wheels/{sha256}/{name}"

    def orders(self, unit: str) -> str:
        """What leads back from what a deploy of `unit` orders; there until it is through."""
        return f"{self.home}/rollout-{unit}.json"

    def before(self, service: str) -> str:
        """The text of a unit that is being changed; it lies there until the change is through."""
        return f"{self.home}/changing/{service}"


@dataclass(frozen=True, slots=True)
class Making:
    """What a unit is made from; `topology` is the file on its host."""

    release: str
    topology: str


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a host's systemd is like. `version` 0: unknown."""

    system: bool
    version: int = 0


def systemd_version(text: str) -> int:
    """252 of "252.38-1~deb12u1"; 0 where it says nothing."""
    digits = "".join(char for char in text.split(".")[0].split("-")[0] if char.isdigit())
    return int(digits) if digits else 0


@dataclass(frozen=True, slots=True)
class Wants:
    """What a process needs of its unit beside the usual."""

    devices: bool = False
    """It computes on GPUs, or sends over their network."""
    workers: bool = False
    """It has Workers, whose sandbox makes namespaces of its own."""
    low_port: bool = False
    """It listens below 1024."""
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    """It writes into them beside the world's own."""


def service_name(world: str, name: str) -> str:
    return f"skerry-{world}-{name}.service"


def made_from(text: str) -> Making | None:
    """What the unit of this text is made from; None for one that is not ours."""
    found = {one["key"]: one["value"] for one in _FACT.finditer(text)}
    if not {"Release", "Topology"} <= found.keys():
        return None
    return Making(found["Release"], found["Topology"])


def unit_of(text: str) -> str:
    """The edge or region that the unit of this text is of."""
    found = {one["key"]: one["value"] for one in _FACT.finditer(text)}
    return found.get("Unit", "")


def render(seat: Seat, making: Making, place: Place, keeping: Keeping, wants: Wants) -> str:
    """The text of the unit of `seat`."""
    return "\n".join(_lines(seat, making, place, keeping, wants)) + "\n"


def _lines(
    seat: Seat, making: Making, place: Place, keeping: Keeping, wants: Wants
) -> Iterator[str]:
    yield "# Made by `skerry deploy --target ssh`; what is changed here is lost with the next one."
    yield "[Unit]"
    yield f"Description=Skerry {seat.kind} {seat.name} of {place.world}"
    yield "Wants=network-online.target"
    yield "After=network-online.target"
    yield "StartLimitIntervalSec=0"
    yield from ("", "[Service]", "Type=exec")
    yield f"ExecStart={_command(seat, making, place)}"
    if seat.kind is Kind.EDGE:
        reload = (*_python(making), "deploy.ssh.take_over", *_base(seat, making, place))
        yield f"ExecReload={_words(*reload)}"
        yield "TimeoutStartSec=300"
    yield f"WorkingDirectory={_path(place.state)}"
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **wants.environment}
    yield from (f'Environment="{key}={_in_quotes(value)}"' for key, value in environment.items())
    yield from (f"EnvironmentFile={_path(path)}" for path in wants.environment_files)
    yield from _ALWAYS
    if keeping.version >= 254:
        yield from _BACK_OFF
    yield f"TimeoutStopSec={STOP_S[seat.kind]}"
    yield from _hardening(place, keeping, wants)
    yield from ("", "[Install]")
    yield f"WantedBy={'multi-user' if keeping.system else 'default'}.target"
    yield from ("", "[X-Skerry]")
    yield f"Unit={seat.unit}"
    yield f"Release={making.release}"
    yield f"Topology={making.topology}"


_ALWAYS = (
    "Restart=on-failure",
    "RestartPreventExitStatus=2",  # a configuration that is refused is refused again
    "RestartSec=1",
    "KillMode=mixed",  # the first process takes leave in order, and has what it started do so too
    f"LimitNOFILE={FILES}",
    "LimitMEMLOCK=infinity",
    "LimitNICE=+0",  # what an edge lowers of its Workers, it may raise again
    "UMask=0077",
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
)
_BACK_OFF = ("RestartSteps=5", "RestartMaxDelaySec=30")
_MOUNTS = (
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectControlGroups=yes",
    "ProtectKernelModules=yes",
    "ProtectHostname=yes",
)

_KERNEL = ("ProtectKernelTunables=yes", "ProtectKernelLogs=yes")
_DEVICES = ("ProtectClock=yes", "PrivateDevices=yes")


def _hardening(place: Place, keeping: Keeping, wants: Wants) -> Iterator[str]:
    """What keeps a process to its own, and breaks neither GPUs (devices stay) nor the sandbox of
    Workers (namespaces, capabilities and /proc stay) nor compilers at run time (memory may become
    code)."""
    if not wants.workers:
        yield "RestrictNamespaces=yes"
    if not keeping.system:
        return  # the rest needs mounts, which a user's own systemd often cannot make
    yield from _MOUNTS
    yield f"ReadWritePaths={' '.join(map(_path, (place.home, *wants.folders)))}"
    if wants.workers:
        return
    yield f"CapabilityBoundingSet={'CAP_NET_BIND_SERVICE' if wants.low_port else ''}"
    yield from _KERNEL
    if not wants.devices:
        yield from _DEVICES


def _command(seat: Seat, making: Making, place: Place) -> str:
    module: tuple[str, ...]
    match seat.kind:
        case Kind.EDGE:
            module = ("deploy.ssh.holder",)
        case Kind.ROUTER:
            module = ("regional", "router")
        case _:
            module = ("regional", "node")
    return _words(*_python(making), *module, *_base(seat, making, place))


def _python(making: Making) -> tuple[str, ...]:
    return (f"{making.release}/bin/python", "-m")


def _base(seat: Seat, making: Making, place: Place) -> tuple[str, ...]:
    return ("--topology", making.topology, "--state", place.state, "--name", seat.name)


def _words(*words: str) -> str:
    """A command line as systemd reads it: `$` and `%` stand for themselves."""
    return " ".join(_word(word) for word in words)


def _word(word: str) -> str:
    escaped = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[A-Za-z0-9_./:@=+%$,-]+", escaped):
        return escaped
    return f'"{_in_quotes(escaped, percent=False)}"'


def _path(path: str) -> str:
    return path.replace("%", "%%")


def _in_quotes(value: str, *, percent: bool = True) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return escaped.replace("%", "%%") if percent else escaped
