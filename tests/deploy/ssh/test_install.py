"""What a host has to be like, what its processes need, and that releases of a world agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from core.config import Observe, Topology
from core.errors import ConfigError
from deploy.ssh.channel import Facts
from deploy.ssh.hosts import Seat, seats
from deploy.ssh.install import Told, complain, extras, note, speaks
from tests.deploy.ssh.world import topology

GOOD = Facts(
    python="3.11.2", implementation="CPython", system="Linux", machine="x86_64",
    libc=("glibc", "2.36"), folder="/opt/skerry", writable=True, free_bytes=10 << 30,
    user="keeper", manager="user", units="/var/lib/keeper/.config/systemd/user", systemd="252",
    linger=True, packages=(), pip=True, venv=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"system": "Darwin"}, "alpha: it runs Darwin; systemd units need Linux"),
        ({"implementation": "PyPy"}, "alpha: its Python is PyPy"),
        ({"systemd": ""}, "alpha: no systemd answers to keeper: `loginctl enable-linger keeper`"),
        ({"systemd": "", "manager": "system"}, "alpha: systemd does not answer"),
        ({"writable": False}, "alpha: keeper may not write to /opt/skerry: `mkdir -p /opt/skerry"),
        ({"free_bytes": 1 << 30}, "alpha: 1.1 GB are free at /opt/skerry, and this release needs"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_a_host_lacks_is_said_with_its_fix(change: dict[str, object], words: str) -> None:
    why = complain("alpha", replace(GOOD, **change), 500 << 20)
    assert why is not None
    assert why.startswith(words)


def test_a_good_host_is_taken_and_one_that_ends_with_a_login_is_noted() -> None:
    assert complain("alpha", GOOD, 500 << 20) is None
    assert note("alpha", GOOD) is None
    assert "loginctl enable-linger keeper" in (note("alpha", replace(GOOD, linger=False)) or "")


def test_each_role_has_its_part_of_the_project(tmp_path: Path) -> None:
    given = topology(tmp_path, tmp_path / "ssh_config")

    def of(name: str, topology: Topology = given, *, torch: bool = False) -> set[str]:
        own: list[Seat] = [seats(topology)[name]]
        return set(extras(topology, own, torch=torch))

    assert of("nyc") == set()
    assert of("eu") == {"region"}
    assert of("eu-decode", torch=True) == {"node"}
    assert of("eu-decode") == {"region"}
    traced = replace(given, observe=Observe(otlp="http://collector:4318"))
    assert of("nyc", traced) == {"otel"}


def test_releases_of_one_world_speak_one_wire() -> None:
    speaks(Told("1", 3), iter([("eu on beta", Told("0", 3))]))
    with pytest.raises(ConfigError, match="speaks wire 4, and eu on beta runs one of wire 3"):
        speaks(Told("1", 4), iter([("eu on beta", Told("0", 3))]))
