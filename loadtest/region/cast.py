"""The processes of one measurement: a router, its nodes, and who asks them. All on loopback."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from loadtest.edge.cast import NotStarted, Running, free_port, started

HOST = "127.0.0.1"
SECRET = secrets.token_hex(16)
MODEL = "bundled"


@dataclass(frozen=True, slots=True)
class Node:
    """`more`: further lines of its part of the topology. `cores`: which ones it may use."""

    name: str
    role: str
    module: str = "regional"
    more: str = ""
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """One that is up."""

    url: str
    router: Running
    nodes: tuple[Running, ...]

    def status(self) -> dict[str, object]:
        answer = httpx.get(f"{self.url}/status", timeout=5, trust_env=False)
        page: dict[str, object] = answer.json()
        return page


@contextmanager
def region(
    folder: Path,
    nodes: Sequence[Node],
    *,
    model: str,
    more: str = "",
    cores: tuple[int, ...] = (),
) -> Iterator[Region]:
    """A router on `cores` and its nodes, all of which have joined. `model`: lines of its part of
    the topology; `more`: of the region's. Raises NotStarted."""
    for name in ("region", "fleet"):
        secret = folder / f"{name}.secret"
        secret.touch(mode=0o600)
        secret.write_text(SECRET, encoding="ascii")
    http, grpc = free_port(), free_port()
    topology = folder / "region.toml"
    topology.write_text(_topology(http, grpc, nodes, model, more), encoding="utf-8")
    words = ["--topology", str(topology), "--state", str(folder), "--name"]
    url = f"http://{HOST}:{http}"
    with ExitStack() as stack:
        command = [sys.executable, "-m", "regional", "router", *words, "measured"]
        router = stack.enter_context(
            started("router", command, folder / "router.log", http, f"{url}/healthz")
        )
        _pin(router, cores)
        running = []
        for node in nodes:
            role = ["node"] if node.module == "regional" else []
            command = [sys.executable, "-m", node.module, *role, *words, node.name]
            ready = f"{url}/status"
            one = stack.enter_context(
                started(node.name, command, folder / f"{node.name}.log", 0, ready)
            )
            _pin(one, node.cores)
            running.append(one)
        region = Region(url, router, tuple(running))
        _await(region, len(nodes))
        for one, node in zip(running, nodes, strict=True):
            _pin(one, node.cores)  # with the ranks that it has started meanwhile
        yield region


def _topology(http: int, grpc: int, nodes: Sequence[Node], model: str, more: str) -> str:
    lines = [
        "version = 1",
        "[limits]\nqueue = 4096",
        f"[models.{MODEL}]\n{model}",
        '[[edges]]\nname = "none"',
        f'[[regions]]\nname = "measured"\nhttp = "{HOST}:{http}"\ngrpc = "{HOST}:{grpc}"\n{more}',
    ]
    lines += [
        f'[[regions.nodes]]\nname = "{node.name}"\nrole = "{node.role}"\nmodel = "{MODEL}"\n'
        f"{node.more}"
        for node in nodes
    ]
    return "\n".join(lines) + "\n"


def _await(region: Region, nodes: int) -> None:
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        page = region.status()
        known = page["nodes"]
        assert isinstance(known, list), "a status page lists its nodes"
        if sum(bool(one["alive"]) for one in known) == nodes:
            return
        for one in (region.router, *region.nodes):
            if one.process.poll() is not None:
                raise NotStarted(f"{one.name} ended at once")
        time.sleep(0.1)
    raise NotStarted("the nodes did not join")


def _pin(running: Running, cores: tuple[int, ...]) -> None:
    if not cores:
        return
    process = psutil.Process(running.process.pid)
    for one in (process, *process.children(recursive=True)):
        for thread in one.threads():
            psutil.Process(thread.id).cpu_affinity(list(cores))
