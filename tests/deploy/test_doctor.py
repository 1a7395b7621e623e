"""The machine check: each finding by table, the whole on a Python that has nothing installed."""

import ast
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import sizes
from deploy.doctor import (
    FAIL,
    OK,
    WARN,
    Finding,
    Machine,
    examine,
    inspect_machine,
    is_busy,
    topology_ports,
)

ROOT = Path(__file__).parents[2]
GOOD = Machine(
    python=(3, 11, 7),
    executable="/usr/bin/python3",
    system="Linux",
    arch="x86_64",
    glibc=True,
    has_venv=True,
    env_ready=False,
    memory_mb=8000,
    disk_mb=50_000,
    compiler="c++",
    gpu=None,
    better_python=None,
    busy_ports=(),
    ports=(8787, 8788),
)


def finding(machine: Machine, what: str) -> Finding:
    return next(f for f in examine(machine) if f.what == what)


def test_a_good_machine_passes_everything() -> None:
    assert [f.level for f in examine(GOOD)] == [OK] * 8


@pytest.mark.parametrize(
    ("change", "what", "level", "words"),
    [
        ({"python": (3, 9, 2)}, "python", FAIL, "3.9.2 is too old"),
        ({"python": (3, 9, 2)}, "python", FAIL, "install Python 3.11 or 3.12"),
        ({"python": (3, 10, 0), "better_python": "python3.12"}, "python", FAIL, "PY=python3.12"),
        ({"python": (3, 13, 1)}, "python", WARN, "newer than what Skerry is tested on"),
        ({"python": (3, 15, 0)}, "python", FAIL, "no build of PyTorch"),
        ({"system": "Darwin", "arch": "x86_64"}, "platform", FAIL, "Intel Macs"),
        ({"system": "Darwin", "arch": "arm64", "glibc": False}, "platform", OK, "Darwin"),
        ({"system": "Windows"}, "platform", FAIL, "WSL"),
        ({"glibc": False}, "platform", WARN, "without glibc"),
        ({"has_venv": False}, "venv", FAIL, "apt-get install python3.11-venv"),
        ({"has_venv": False, "env_ready": True}, "venv", OK, "exists already"),
        ({"memory_mb": 900}, "memory", FAIL, "0.9 GB free"),
        ({"memory_mb": 2000}, "memory", WARN, "TOPOLOGY=local"),
        ({"memory_mb": None}, "memory", WARN, "could not be read"),
        ({"disk_mb": 500}, "disk", FAIL, "make room"),
        ({"disk_mb": 1400}, "disk", FAIL, ".venv takes 1.2 GB, 2.9 GB with what the tests need"),
        ({"disk_mb": 500, "env_ready": True}, "disk", OK, "exists already"),
        ({"disk_mb": 5000, "gpu": "NVIDIA H200"}, "disk", WARN, "CUDA build"),
        ({"busy_ports": (8787,)}, "ports", WARN, "8787 in use"),
        ({"ports": ()}, "ports", WARN, "could not be read"),
        ({"compiler": None}, "compiler", WARN, "install g++"),
        ({"gpu": "NVIDIA H200"}, "gpu", OK, "H200"),
    ],
)
def test_finding(change: dict[str, object], what: str, level: str, words: str) -> None:
    got = finding(GOOD._replace(**change), what)  # type: ignore[arg-type]  # a table of fields
    assert got.level == level
    assert words in got.line()
    assert "\n" not in got.line()


def test_readme_quotes_the_sizes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.search(r"first time: .* (\d+) MB fetched, ([\d.]+) GB on disk", readme)
    assert quoted is not None
    assert abs(int(quoted[1]) - sizes.FETCH_MB) <= 10
    assert float(quoted[2]) == round(sizes.ENV_MB / 1000, 1)


def test_is_busy_sees_a_listener(free_port: int) -> None:
    assert not is_busy("127.0.0.1", free_port)
    with socket.create_server(("127.0.0.1", free_port)):
        assert is_busy("127.0.0.1", free_port)


def test_busy_port_of_the_topology_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = tmp_path / "t.toml"
        path.write_text(f'[[edges]]\nname = "a"\nlisten = "127.0.0.1:{port}"\n')
        assert inspect_machine(path).busy_ports == (port,)


@pytest.mark.parametrize("text", ["", "edges = 3", "[[edges]]\nlisten = 'x'", "not toml at all"])
def test_ports_of_a_broken_topology_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    assert topology_ports(path) == []


@pytest.mark.parametrize("name", ["__init__", "doctor", "setup_env", "progress", "sizes"])
def test_what_runs_first_parses_on_old_pythons(name: str) -> None:
    source = (ROOT / "deploy" / f"{name}.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 9))
    assert "from __future__ import annotations" in source or name == "__init__"


def test_doctor_refuses_an_old_python_in_one_line() -> None:
    """The real module on a Python that says it is old and has no tomllib."""
    code = (
        "import sys; sys.version_info = (3, 9, 18, 'final', 0); sys.modules['tomllib'] = None\n"
        "from deploy.doctor import main; sys.exit(main(['--quiet']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("fail  python    3.9.18 is too old")


def test_doctor_needs_no_package_and_little_time() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         f"import sys; sys.path.insert(0, {str(ROOT)!r});"
         "from deploy.doctor import main; sys.exit(main([]))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    computed_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert computed_s < 2.0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 8
