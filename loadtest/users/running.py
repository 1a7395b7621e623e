"""A world of this machine for users to ask, and Locust beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from loadtest.users.answers import Answer, Slo

ROOT = Path(__file__).resolve().parents[2]
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
START_S = 180.0
END_S = 15.0
LAPTOP = Slo(ttft_s=3.0, per_token_s=0.4)
"""The service level of a laptop's CPU; give others for other machines."""
COMMAND_S = 300.0


class Failed(Exception):
    """The world did not come up, or did not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Running:
    """`edges`: their URLs by name. `log`: what `skerry up` says."""

    edges: dict[str, str]
    state: Path
    log: Path

    @property
    def urls(self) -> list[str]:
        return list(self.edges.values())

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def skerry(self, *words: str) -> str:
        """A command to this world: what it says. Raises Failed."""
        done = subprocess.run(
            [sys.executable, "-m", "deploy.cli", *words, "--state", str(self.state)],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
            timeout=COMMAND_S,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"skerry {' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout


class _Current(msgspec.Struct):
    edges: dict[str, str]


def bases_of(given: str) -> list[str]:
    """One or more base URLs, with commas between. Raises Failed, also where there is none."""
    found = [url_of(one).rstrip("/") for one in map(str.strip, given.split(",")) if one]
    return found or [url_of("")]


def url_of(given: str) -> str:
    """Of http where it has no scheme. Raises Failed."""
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    except ValueError:
        pass
    raise Failed(f"{given!r} is no base URL of a server, such as http://127.0.0.1:8787")


@contextmanager
def world(topology: str) -> Iterator[Running]:
    """A world of its own, in a state folder of its own. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="skerry-load-") as folder:
        state, log = Path(folder) / "state", Path(folder) / "up.log"
        print(f"starting the world of {topology}", flush=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "up", "--topology", topology,
                 "--state", str(state)],
                cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            yield Running(_edges(process, state / "current.json", log), state, log)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def _edges(process: subprocess.Popen[bytes], current: Path, log: Path) -> dict[str, str]:
    """Once the world is ready. Raises Failed."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(current.read_bytes(), type=_Current).edges
        time.sleep(0.2)
    raise Failed(f"the world did not come up:\n{log.read_text(errors='replace')[-2000:]}")


def environment() -> dict[str, str]:
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


class Told(msgspec.Struct):
    """What Locust writes at its end: `began` in Unix seconds; answers count from then."""

    began: float
    seconds: float
    answers: list[Answer]


def needs_locust() -> None:
    """Raises Failed where it is not installed."""
    if importlib.util.find_spec("locust") is None:
        raise Failed("Locust is not installed here: `make load` and `make scenarios` install it")


@contextmanager
def locust(
    edges: Sequence[str], seconds: float, out: Path, *, users: int, more: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Users of a run, as a process; the block is left when they are done."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"),
            *("--host", edges[0], "--edges", ",".join(edges), "--users", str(users)),
            *("--run-time", f"{seconds:.0f}s", "--stop-timeout", "30", "--only-summary"),
            *("--answers", str(out), "--think", "0.5", *more),
        ],
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
        process.wait()
    finally:
        process.kill()
        process.wait()


def told_in(out: Path) -> Told:
    """Raises Failed."""
    try:
        return msgspec.convert(json.loads(out.read_text(encoding="utf-8")), Told)
    except (OSError, ValueError) as error:
        raise Failed(f"Locust left no answers in {out}: {error}") from error


def shipped(name: str) -> str:
    """The text of one of the topologies that come with us."""
    return (ROOT / "deploy" / "topologies" / f"{name}.toml").read_text(encoding="utf-8")
