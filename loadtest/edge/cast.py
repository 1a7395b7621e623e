"""The processes of one measurement: doubles, an edge of ours, vLLM's router. All on loopback."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from loadtest.bench import peers
from loadtest.edge.clients import HOST
from loadtest.edge.doubles import MODEL

PROJECT = Path(__file__).resolve().parents[2]
START_S = 30.0
ROUTER_PACKAGE = "vllm-router"


class NotStarted(Exception):
    """A process did not come up; the message shows the end of what it said."""


@dataclass(frozen=True, slots=True)
class Running:
    """A process with its port."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """User and system time of it and what it started."""
        times = [one.cpu_times() for one in self._family()]
        return float(sum(one.user + one.system for one in times))

    def resident_mb(self) -> float:
        return float(sum(one.memory_info().rss for one in self._family()) / 1e6)

    def _family(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


@contextmanager
def double(kind: str, name: str = "double") -> Iterator[Running]:
    """`name`: of a region."""
    command = [sys.executable, "-m", "loadtest.edge.doubles", kind, "--port", "0", "--name", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT, env=_environment())
    with _ended(process):
        assert process.stdout is not None, "a pipe was asked for"
        said = process.stdout.readline()
        if not said:
            raise NotStarted(f"the {kind} double ended at once")
        port: int = msgspec.json.decode(said)["port"]
        yield Running(f"{kind} double", port, process)


@contextmanager
def edge(region_port: int, folder: Path) -> Iterator[Running]:
    """Our edge as operators run it: metrics and logs on, one worker."""
    port = free_port()
    command = edge_over(region_port, folder, port, settings="[limits]\nqueue = 1024")
    url = f"http://{HOST}:{port}/readyz"
    with started("skerry", command, folder / "edge.log", port, url) as running:
        yield running


def edge_over(
    region_port: int, folder: Path, port: int, *, settings: str, more: Sequence[str] = ()
) -> list[str]:
    """The command of an edge in front of the double of a region, with its secrets and topology
    written to `folder`. `settings`: tables of the topology; `more`: lines of its edge's."""
    for name in ("region", "fleet", "admin"):
        secret = folder / f"{name}.secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16), encoding="ascii")
    lines = "\n".join(more)
    topology = folder / "edge.toml"
    topology.write_text(
        f"""
version = 1
[access]
anonymous = "until-keys"
{settings}
[models.{MODEL}]
source = "double.gguf"
[[edges]]
name = "measured"
listen = "{HOST}:{port}"
{lines}
[[regions]]
name = "double"
http = "{HOST}:{region_port}"
[[regions.nodes]]
name = "double-1"
role = "combined"
model = "{MODEL}"
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "edge", "--topology", str(topology), "--state", str(folder)]
    return [*command, "--name", "measured"]


@contextmanager
def router(worker_port: int, folder: Path, binary: Path) -> Iterator[Running]:
    """vLLM's router over the OpenAI double, with its own defaults but for one worker's policy."""
    port, metrics = free_port(), free_port()
    command = [str(binary), "--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--worker-urls", f"http://{HOST}:{worker_port}", "--policy", "round_robin"]
    url = f"http://{HOST}:{port}/health"
    with started(ROUTER_PACKAGE, command, folder / "router.log", port, url) as running:
        yield running


def router_binary() -> tuple[Path, str] | None:
    """vLLM's router among the peers, and its version."""
    found = peers.find(peers.folder(PROJECT, os.environ))
    binary = found.root / "bin" / ROUTER_PACKAGE
    if not binary.is_file():
        return None
    return binary, found.versions.get(ROUTER_PACKAGE, "?")


@contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="skerry-edge-") as folder:
        yield Path(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(
    name: str, command: Sequence[str], log: Path, port: int, ready: str
) -> Iterator[Running]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, cwd=PROJECT, env=_environment()
        )
    with _ended(process):
        _wait_until(lambda: _answers(ready), process, name, log)
        yield Running(name, port, process)


def _wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], name: str, log: Path
) -> None:
    end = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            raise NotStarted(f"{name} did not come up:\n" + "\n".join(lines))
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PROJECT), "NO_PROXY": HOST, "no_proxy": HOST}
