"""`python -m deploy.ssh.take_over --topology FILE --state FOLDER --name NAME`: have an edge of this
release and topology take the place of the one that runs on this machine (`systemctl reload`).

It returns once the new process hears a region and accepts callers, and the first one has been told
to end with its last answer; or it says why not, and the first one goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
import time
from pathlib import Path

import httpx
import msgspec

from core.config import World, load
from core.errors import ConfigError
from deploy.calling import mounts
from deploy.fleet import descendants
from deploy.rollout.asking import Asking
from deploy.ssh.holder import command_of, control_of

READY_S = 120.0


class Said(msgspec.Struct, frozen=True):
    """A line of the holder's."""

    pid: int = 0
    at: str = ""
    ended: int | None = None
    kept: bool = False
    error: str = ""


class Line:
    """The connection with the holder of the edge `name`."""

    def __init__(self, name: str) -> None:
        """In the state folder. Raises ConfigError."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(control_of(name))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"no holder of edge {name} runs here: {error.strerror}") from error
        self._lines = self._socket.makefile("rb")

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def ask(self, **what: object) -> Said:
        self._socket.sendall(json.dumps(what).encode() + b"\n")
        return self.read()

    def read(self) -> Said:
        """Raises ConfigError."""
        try:
            said = msgspec.json.decode(self._lines.readline(), type=Said)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError("the holder of the edge ended meanwhile") from error
        if said.error:
            raise ConfigError(said.error)
        return said

    def has_news(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])


def take_over(world: World, name: str, *, ready_s: float = READY_S) -> None:
    """Raises ConfigError; then the first process goes on."""
    edge = world.topology.edge(name)
    os.chdir(world.state)
    with httpx.Client(mounts=mounts(world), trust_env=False) as client, Line(name) as line:
        asking = Asking(client, world, _pause)
        began = line.ask(command=command_of(world.path, world.state, name))

        def answers() -> bool:
            if line.has_news() and (code := line.read().ended) is not None:
                raise ConfigError(f"the new process ended while starting, exit code {code}")
            if began.at:
                return asking.hears(f"http://{began.at}")
            return asking.crew_hears(edge.url, descendants(began.pid), edge.workers)

        asking.until(answers, ready_s, else_=lambda: "the new process does not hear a region")
        if not line.ask(keep=True).kept:
            raise ConfigError("the new process ended as it was taking over")


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.ssh.take_over", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the edge's name")
    options = parser.parse_args()
    try:
        take_over(load(options.topology, state=options.state.resolve()), options.name)
    except ConfigError as error:
        sys.stderr.write(f"edge {options.name}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
