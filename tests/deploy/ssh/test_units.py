"""The text of units: what systemd itself says of it, and what a unit tells of its making."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.rollout.steps import Kind
from deploy.ssh.hosts import Seat
from deploy.ssh.units import Keeping, Making, Place, Wants, made_from, render, service_name, unit_of
from tests.servers import needed

PLACE = Place("/opt/skerry", "far")
MAKING = Making("/opt/skerry/releases/1a2b", "/opt/skerry/far/topologies/3c4d.toml")
SYSTEM, USER = Keeping(system=True, version=252), Keeping(system=False, version=252)
EDGE = Seat("nyc", Kind.EDGE, "nyc", "alpha")
NODE = Seat("eu-decode", Kind.NODE, "eu", "beta")


def lines(text: str) -> set[str]:
    return set(text.splitlines())


@pytest.mark.parametrize("keeping", [SYSTEM, USER], ids=["system", "user"])
@pytest.mark.parametrize(
    ("seat", "wants"),
    [
        (EDGE, Wants(low_port=True)),
        (EDGE, Wants(workers=True, environment_files=("/opt/skerry/far/secrets.env",))),
        (Seat("eu.2", Kind.ROUTER, "eu", "beta"), Wants()),
        (NODE, Wants(devices=True, environment={"OMP_NUM_THREADS": "4"}, folders=("/srv/kv",))),
    ],
    ids=["edge", "workers", "router", "gpu"],
)
def test_systemd_finds_nothing_wrong(
    tmp_path: Path, seat: Seat, wants: Wants, keeping: Keeping
) -> None:
    program = tmp_path / "releases" / "a b%c" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    making = Making(str(program.parent.parent), MAKING.topology)
    unit = tmp_path / service_name("far", seat.name)
    unit.write_text(render(seat, making, PLACE, keeping, wants), encoding="utf-8")
    done = subprocess.run(
        [needed("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if unit.name in line or "far" in line]
    assert said == []
    assert done.returncode == 0


def test_a_unit_says_what_it_is_made_of() -> None:
    text = render(NODE, MAKING, PLACE, SYSTEM, Wants())
    assert made_from(text) == MAKING
    assert unit_of(text) == "eu"
    assert made_from("[Unit]\nDescription=somebody else's\n") is None


def test_an_edge_is_reloaded_by_its_new_release() -> None:
    text = lines(render(EDGE, MAKING, PLACE, SYSTEM, Wants()))
    base = "--topology /opt/skerry/far/topologies/3c4d.toml --state /opt/skerry/far/state"
    python = "/opt/skerry/releases/1a2b/bin/python -m"
    assert f"ExecStart={python} deploy.ssh.holder {base} --name nyc" in text
    assert f"ExecReload={python} deploy.ssh.take_over {base} --name nyc" in text
    assert "KillMode=mixed" in text


def test_a_stop_leaves_more_time_than_the_drain_takes() -> None:
    from edge.serving import GRACE_S
    from regional.app import DRAIN_GRACE_S

    found = {
        seat.kind: float(line.partition("=")[2])
        for seat in (EDGE, NODE, Seat("eu", Kind.ROUTER, "eu", "beta"))
        for line in render(seat, MAKING, PLACE, SYSTEM, Wants()).splitlines()
        if line.startswith("TimeoutStopSec=")
    }
    assert found[Kind.EDGE] > GRACE_S + 10
    assert found[Kind.ROUTER] > DRAIN_GRACE_S + 10
    assert found[Kind.NODE] > DRAIN_GRACE_S + 10


def test_hardening_leaves_gpus_the_sandbox_and_compilers_alone() -> None:
    plain = lines(render(NODE, MAKING, PLACE, SYSTEM, Wants()))
    gpu = lines(render(NODE, MAKING, PLACE, SYSTEM, Wants(devices=True)))
    workers = lines(render(EDGE, MAKING, PLACE, SYSTEM, Wants(workers=True)))
    assert plain - gpu == {"PrivateDevices=yes", "ProtectClock=yes"}
    assert {"ProtectSystem=strict", "NoNewPrivileges=yes"} <= plain & gpu & workers
    breaks_the_sandbox = {
        "RestrictNamespaces=yes", "ProtectKernelTunables=yes", "CapabilityBoundingSet=",
    }  # fmt: skip
    assert breaks_the_sandbox <= plain
    assert not breaks_the_sandbox & workers
    assert not any(line.startswith("MemoryDenyWriteExecute") for line in plain | gpu | workers)
    assert "ReadWritePaths=/opt/skerry/far" in plain


def test_what_is_between_percent_signs_and_blanks_stays_one_word() -> None:
    text = render(NODE, Making("/opt/a b/50%/$x", MAKING.topology), PLACE, USER, Wants())
    assert 'ExecStart="/opt/a b/50%%/$$x/bin/python" -m regional node' in text


def test_back_off_grows_where_systemd_knows_how() -> None:
    old = lines(render(NODE, MAKING, PLACE, SYSTEM, Wants()))
    new = lines(render(NODE, MAKING, PLACE, Keeping(system=True, version=255), Wants()))
    assert new - old == {"RestartSteps=5", "RestartMaxDelaySec=30"}
