"""compose.yaml and the container files: what they name is there, and what they install is whole.

No container runs here; that the installed package works without the repository is seen in a wheel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_its_services_are_the_processes_of_its_topology(compose: dict[str, Any]) -> None:
    topology = load(DEPLOY / compose["configs"]["topology"]["file"], state=ROOT).topology
    wanted = [("edge", edge.name, edge.listen) for edge in topology.edges]
    wanted += [("router", region.name, region.http) for region in topology.regions]
    wanted += [("node", n.name, n.host) for region in topology.regions for n in region.nodes]
    given = {}
    for service, what in compose["services"].items():
        if (command := what.get("command")) is not None:
            given[command[0], command[command.index("--name") + 1]] = service
    assert set(given) == {(kind, name) for kind, name, _ in wanted}
    for kind, name, address in wanted:
        host = address.partition(":")[0]
        assert host in (given[kind, name], "0.0.0.0"), f"{name} is not reached at {address}"


def test_its_secrets_are_those_that_the_topology_refers_to(compose: dict[str, Any]) -> None:
    secrets = load(DEPLOY / "topologies" / "compose.toml", state=ROOT).topology.secrets
    for name in ("region", "fleet"):
        assert getattr(secrets, name) == f"file:/run/secrets/{name}"
        assert name in compose["secrets"]
    for service in ("edge", "router", "prefill", "decode"):
        assert set(compose["services"][service]["secrets"]) >= {"region", "fleet"}


def test_what_it_mounts_is_there(compose: dict[str, Any]) -> None:
    for what in compose["services"].values():
        for volume in what.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
        build = what.get("build")
        if build is not None:
            assert (ROOT / build["dockerfile"]).exists()
    scraped = yaml.safe_load((DEPLOY / "observe" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [t for job in scraped for one in job["static_configs"] for t in one["targets"]]
    assert {target.partition(":")[0] for target in targets} <= set(compose["services"])
    assert all(port.startswith("127.0.0.1:") for what in compose["services"].values()
               for port in what.get("ports", []))  # fmt: skip


@pytest.mark.parametrize("name", ["edge", "node"])
def test_a_container_copies_what_there_is(name: str) -> None:
    text = (DEPLOY / "containers" / f"{name}.Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    assert copied
    for sources in copied:
        for source in sources.split():
            assert (ROOT / source).exists(), source


def test_a_wheel_has_all_that_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    packages = ("core", "edge", "regional", "kernels", "deploy")
    for package in packages:
        for path in (ROOT / package).rglob("*"):
            kind = path.suffix
            if path.is_file() and "__pycache__" not in path.parts and kind in (
                ".py", ".js", ".css", ".html", ".svg", ".cpp", ".h", ".toml",
            ):  # fmt: skip
                assert path.relative_to(ROOT).as_posix() in inside, path
