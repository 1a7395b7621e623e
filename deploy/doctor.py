"""`python3 -m deploy.doctor`: is this machine fit for Skerry? One line for each finding.

Runs before anything is installed and on Pythons that are too old, so: standard library only, and
nothing that Python 3.9 cannot run (newer annotations are fine, nobody evaluates them). The checks
are pure functions over a `Machine`, which `inspect_machine` reads; the whole takes less than 2 s.
Exit code 0 unless something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deploy.sizes import ENV_CUDA_MB, ENV_MB, ENV_TEST_MB, FETCH_MB

OLDEST = (3, 11)
NEWEST_TESTED = (3, 12)
NEWEST_WITH_TORCH = (3, 14)

WORLD_MB = 3500
"""Resident memory of the default world while it answers."""

OK, WARN, FAIL = "ok", "warn", "fail"
ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TOPOLOGY = ROOT / "deploy" / "topologies" / "two-regions.toml"


class Finding(NamedTuple):
    level: str
    what: str
    text: str
    fix: str = ""

    def line(self) -> str:
        tail = f" → {self.fix}" if self.fix else ""
        return f"{self.level:<4}  {self.what:<9} {self.text}{tail}"


class Machine(NamedTuple):
    """What the checks look at. Sizes in MB; None: could not be found out."""

    python: tuple[int, int, int]
    executable: str
    system: str
    arch: str
    glibc: bool
    has_venv: bool
    env_ready: bool
    memory_mb: int | None
    disk_mb: int | None
    compiler: str | None
    gpu: str | None
    better_python: str | None
    busy_ports: tuple[int, ...]
    ports: tuple[int, ...]


def check_python(machine: Machine) -> Finding:
    version = ".".join(str(part) for part in machine.python)
    pair = machine.python[:2]
    wanted = f"{OLDEST[0]}.{OLDEST[1]} or {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}"
    if machine.better_python:
        fix = f"run `make PY={machine.better_python} demo`"
    else:
        fix = f"install Python {wanted} and run `make PY=python3.12 demo`"
    if pair < OLDEST:
        return Finding(FAIL, "python", f"{version} is too old: Skerry needs {wanted}", fix)
    if pair > NEWEST_WITH_TORCH:
        return Finding(FAIL, "python", f"{version} has no build of PyTorch 2.13 yet", fix)
    if pair > NEWEST_TESTED:
        return Finding(
            WARN, "python", f"{version} is newer than what Skerry is tested on ({wanted})"
        )
    return Finding(OK, "python", f"{version} at {machine.executable}")


def check_platform(machine: Machine) -> Finding:
    text = f"{machine.system} {machine.arch}"
    if machine.system == "Darwin" and machine.arch == "x86_64":
        return Finding(
            FAIL, "platform", f"{text}: PyTorch has no builds for Intel Macs any more",
            "use a Mac with Apple silicon or a Linux machine",
        )  # fmt: skip
    if machine.system not in ("Linux", "Darwin"):
        return Finding(FAIL, "platform", f"{text} is not supported", "on Windows, use WSL 2")
    if machine.system == "Linux" and not machine.glibc:
        return Finding(
            WARN, "platform", f"{text} without glibc: PyTorch may have no build for it",
            "use a Debian, Ubuntu or Fedora image",
        )  # fmt: skip
    return Finding(OK, "platform", text)


def check_venv(machine: Machine) -> Finding:
    if machine.has_venv:
        return Finding(OK, "venv", "the modules venv and ensurepip are there")
    if machine.env_ready:
        return Finding(OK, "venv", "ensurepip is missing, but .venv exists already")
    package = f"python{machine.python[0]}.{machine.python[1]}-venv"
    return Finding(
        FAIL, "venv", "this Python has no ensurepip, so it cannot make a .venv",
        f"on Debian or Ubuntu: `sudo apt-get install {package}`",
    )  # fmt: skip


def check_memory(machine: Machine) -> Finding:
    free = machine.memory_mb
    if free is None:
        return Finding(WARN, "memory", "free memory could not be read")
    text = f"{free / 1000:.1f} GB free, the default world uses about {WORLD_MB / 1000:.1f} GB"
    small = "close something, or start the smallest world: `make up TOPOLOGY=local`"
    if free < WORLD_MB // 2:
        return Finding(FAIL, "memory", text, small)
    if free < WORLD_MB:
        return Finding(WARN, "memory", text, small)
    return Finding(OK, "memory", text)


def check_disk(machine: Machine) -> Finding:
    free = machine.disk_mb
    if free is None:
        return Finding(WARN, "disk", "free disk space could not be read")
    if machine.env_ready:
        return Finding(OK, "disk", f"{free / 1000:.1f} GB free, .venv exists already")
    text = (
        f"{free / 1000:.1f} GB free, .venv takes {ENV_MB / 1000:.1f} GB, "
        f"{ENV_TEST_MB / 1000:.1f} GB with what the tests need"
    )
    if free < ENV_MB + FETCH_MB:  # what is fetched lies beside it for a while
        return Finding(FAIL, "disk", text, "make room, or clone into a larger disk")
    if free < ENV_CUDA_MB and machine.gpu:
        return Finding(
            WARN, "disk", f"{text}, {ENV_CUDA_MB / 1000:.0f} GB with a CUDA build of PyTorch"
        )
    return Finding(OK, "disk", text)


def check_ports(machine: Machine) -> Finding:
    if not machine.ports:
        return Finding(WARN, "ports", "the topology's ports could not be read")
    named = ", ".join(str(port) for port in machine.ports)
    if machine.busy_ports:
        busy = ", ".join(str(port) for port in machine.busy_ports)
        return Finding(
            WARN, "ports", f"{busy} in use", "nothing to do: the next free ones will be taken"
        )
    return Finding(OK, "ports", f"{named} free")


def check_compiler(machine: Machine) -> Finding:
    if machine.compiler:
        return Finding(OK, "compiler", f"{machine.compiler} (optional)")
    return Finding(
        WARN, "compiler", "no C++ compiler: optional, PyTorch's own kernels are used",
        "for native kernels install g++ or clang",
    )  # fmt: skip


def check_gpu(machine: Machine) -> Finding:
    return Finding(OK, "gpu", machine.gpu or "no NVIDIA GPU: the CPU will compute")


CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    check_python, check_platform, check_venv, check_memory, check_disk, check_ports,
    check_compiler, check_gpu,
)  # fmt: skip


def examine(machine: Machine) -> list[Finding]:
    return [check(machine) for check in CHECKS]


def inspect_machine(topology: Path) -> Machine:
    ports = topology_ports(topology)
    return Machine(
        python=sys.version_info[:3],
        executable=sys.executable,
        system=platform.system(),
        arch=platform.machine(),
        glibc=platform.libc_ver()[0] == "glibc",
        has_venv=_has_module("venv") and _has_module("ensurepip"),
        env_ready=(ROOT / ".venv" / "bin" / "python").exists(),
        memory_mb=free_memory_mb(),
        disk_mb=shutil.disk_usage(str(ROOT)).free // 1_000_000,
        compiler=next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None),
        gpu=find_gpu(),
        better_python=_better_python(),
        busy_ports=tuple(port for host, port in ports if is_busy(host, port)),
        ports=tuple(port for _, port in ports),
    )


def topology_ports(topology: Path) -> list[tuple[str, int]]:
    """(host, port) of the edges; empty when the file cannot be read, which `skerry up` explains."""
    try:
        import tomllib
    except ImportError:  # Python 3.10 and older: refused by check_python
        return []
    try:
        edges = tomllib.loads(topology.read_text(encoding="utf-8"))["edges"]
        pairs = [edge.get("listen", "127.0.0.1:8787").rpartition(":") for edge in edges]
        return [(host, int(port)) for host, _, port in pairs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def is_busy(host: str, port: int) -> bool:
    """Whether somebody listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return True
        return False


def find_gpu() -> str | None:
    """Names of the NVIDIA GPUs, or None."""
    if not os.path.exists("/dev/nvidiactl") and not shutil.which("nvidia-smi"):
        return None
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=1.5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        # The tool without a driver, or a driver without the tool: only the device file counts.
        return "NVIDIA driver" if os.path.exists("/dev/nvidiactl") else None
    return ", ".join(line.strip() for line in listing.stdout.splitlines()) or None


def free_memory_mb() -> int | None:
    """Memory that new processes can have, within the limit of a container."""
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            table = dict(line.split(":", 1) for line in info)
        free = int(table["MemAvailable"].split()[0]) // 1000
    except (OSError, KeyError, ValueError):
        try:  # macOS does not tell what is free in one number: take all of it
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1_000_000
        except (OSError, ValueError):
            return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        return min(free, (int(limit) - int(used)) // 1_000_000)
    except (OSError, ValueError):  # no control group, or "max"
        return free


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _better_python() -> str | None:
    """Another interpreter on this machine that would do, for the line that says how to go on."""
    for minor in (12, 11):
        if shutil.which(f"python3.{minor}"):
            return f"python3.{minor}"
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deploy.doctor", description="Is this machine fit?")
    parser.add_argument("--topology", type=Path, default=DEFAULT_TOPOLOGY)
    parser.add_argument("--quiet", action="store_true", help="only warnings and failures")
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal must not end in a traceback
    findings = examine(inspect_machine(options.topology))
    for finding in findings:
        if finding.level != OK or not options.quiet:
            print(finding.line())
    return 1 if any(finding.level == FAIL for finding in findings) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
