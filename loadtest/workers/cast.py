"""An edge with Workers over the double of a region."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtest.edge.cast import PROJECT, NotStarted, edge_over, free_port, started
from loadtest.edge.clients import HOST
from loadtest.workers.scripts import Script, write

IDLE_S = 3.0
TURN_S = 5.0
DEPLOY_S = 300.0
"""With the installation of workerd, the first time."""


class Row(msgspec.Struct):
    name: str
    pid: int | None = None
    starts: int = 0


class _Line(msgspec.Struct):
    level: str = "log"
    message: str = ""


class _Rows(msgspec.Struct):
    workers: list[Row]


@dataclass(frozen=True, slots=True)
class Edge:
    port: int
    admin: int
    folder: Path

    def row(self, name: str) -> Row:
        """What its host knows of a Worker."""
        rows = msgspec.json.decode(self._ask("workers"), type=_Rows).workers
        return next(row for row in rows if row.name == name)

    def told(self, name: str) -> list[str]:
        """What the host said of a Worker: why its process ended."""
        lines = self._ask(f"workers/{name}/tail?follow=0&lines=1000").splitlines()
        said = [msgspec.json.decode(line, type=_Line) for line in lines]
        return [line.message for line in said if line.level == "host"]

    def _ask(self, path: str) -> bytes:
        secret = (self.folder / "admin.secret").read_text(encoding="ascii")
        asked = urllib.request.Request(
            f"http://{HOST}:{self.admin}/admin/v1/{path}",
            headers={"authorization": f"Bearer {secret}"},
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            said: bytes = answer.read()
        return said

    def wait_until_cold(self, name: str) -> None:
        """Until nobody has asked it for so long that its process was stopped. Raises NotStarted."""
        end = time.monotonic() + 60
        while self.row(name).pid is not None:
            if time.monotonic() > end:
                raise NotStarted(f"the Worker {name} does not become idle")
            time.sleep(0.05)

    def deploy(self, scripts: Sequence[Script]) -> None:
        """Raises NotStarted."""
        for script in scripts:
            here = write(script, self.folder)
            command = [sys.executable, "-m", "deploy.cli", "worker", "deploy", "--cwd", str(here)]
            command += ["-t", str(self.folder / "edge.toml"), "--state", str(self.folder)]
            done = subprocess.run(
                command, cwd=PROJECT, capture_output=True, text=True, timeout=DEPLOY_S, check=False
            )
            if done.returncode:
                raise NotStarted(f"{script.name} was not deployed: {done.stderr.strip()}")


@contextmanager
def edge(region_port: int, folder: Path) -> Iterator[Edge]:
    port, admin = free_port(), free_port()
    settings = f"[workers]\nidle_s = {IDLE_S}\nturn_s = {TURN_S}\ntrusted = true"
    more = [f'admin = "{HOST}:{admin}"']
    command = edge_over(region_port, folder, port, settings=settings, more=more)
    ready = f"http://{HOST}:{admin}/healthz"
    with started("skerry", command, folder / "edge.log", port, ready):
        yield Edge(port, admin, folder)
