"""The processes of one run: Redis, two region doubles, edges with a state folder each."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from core.keys import append_new, new_key
from loadtest.edge.cast import NotStarted, Running, double, free_port, started
from loadtest.edge.clients import HOST
from loadtest.edge.doubles import MODEL

TIGHT = "tight"
TENANTS = ("free", "wide", "wide", TIGHT)
"""Of four requests in a row: without limits, with limits that never bind, with one that does."""


class NoRedis(Exception):
    """`redis-server` is not installed."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge; its state folder stands for a machine of its own."""

    running: Running
    state: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.running.port}"

    def workers(self) -> list[psutil.Process]:
        """The processes that serve: a lone one, or all that the supervisor started."""
        process = psutil.Process(self.running.process.pid)
        return process.children() or [process]


@dataclass(frozen=True, slots=True)
class Cast:
    edges: list[Edge]
    regions: list[Running]
    keys: dict[str, str]
    """Of each tenant."""


@contextmanager
def cast(folder: Path, *, edges: int, workers: int, tokens_per_minute: int) -> Iterator[Cast]:
    """`tokens_per_minute`: of the tenant `tight`. Raises NoRedis, NotStarted."""
    made = {tenant: new_key(tenant, now=int(time.time())) for tenant in set(TENANTS)}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder))
        regions = [stack.enter_context(double("region", f"double-{i}")) for i in range(2)]
        running: list[Edge] = []
        for number in range(edges):
            state = folder / f"edge-{number}"
            state.mkdir()
            append_new(state / "keys.jsonl", [record for _, record in made.values()])
            for name in ("region", "fleet"):
                (state / f"{name}.secret").write_text(secrets.token_hex(16), encoding="ascii")
            port = free_port()
            topology = state / "edge.toml"
            topology.write_text(
                _topology(port, regions, redis, workers, tokens_per_minute), encoding="utf-8"
            )
            command = [sys.executable, "-m", "edge", "--topology", str(topology)]
            command += ["--state", str(state), "--name", "measured"]
            ready = f"http://{HOST}:{port}/readyz"
            process = stack.enter_context(
                started(f"edge {number}", command, state / "edge.log", port, ready)
            )
            running.append(Edge(process, state))
        yield Cast(running, regions, {tenant: key for tenant, (key, _) in made.items()})


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a Redis on a socket of its own, in memory alone."""
    program = shutil.which("redis-server")
    if program is None:
        raise NoRedis("redis-server is not installed (Debian: apt-get install redis-server)")
    place = folder / "redis.sock"
    command = [program, "--port", "0", "--unixsocket", str(place), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None, "a pipe was asked for"
    try:
        for line in process.stdout:
            if "accept connections" in line:
                break
        else:
            raise NotStarted("redis-server ended at once")
        yield f"unix://{place}"
    finally:
        process.kill()
        process.communicate()


def _topology(
    port: int, regions: list[Running], redis: str, workers: int, tokens_per_minute: int
) -> str:
    text = f"""
version = 1
[budgets]
redis = "{redis}"
[tenants.free]
[tenants.wide]
requests_per_minute = 1_000_000_000
tokens_per_minute = 1_000_000_000
tokens_per_day = 1_000_000_000
concurrent_streams = 1_000_000
[tenants.{TIGHT}]
tokens_per_minute = {tokens_per_minute}
[models.{MODEL}]
source = "double.gguf"
[[edges]]
name = "measured"
listen = "{HOST}:{port}"
workers = {workers}
"""
    for number, region in enumerate(regions):
        text += f"""
[[regions]]
name = "double-{number}"
http = "{HOST}:{region.port}"
[[regions.nodes]]
name = "double-{number}-1"
role = "combined"
model = "{MODEL}"
"""
    return text
