"""What the runbook's tests need: the page's commands, run as they stand there, and a Prometheus
that watches the world by the alert rules that we ship."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.observe import dashboards
from tests.servers import needed
from tests.world.faults import PATIENCE_S, until
from tests.world.scripted import PLAIN, Answer, ask, completion

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "runbook.md"
RULES = Path(dashboards.__file__).with_name("alerts.yml")
MINUTE_S = 1
"""In the rules as they are watched here: nobody waits ten minutes in a test."""
SCRAPE_S = 0.2
COMMAND_S = 60.0
RUNNING = "skerry up"
"""What runs the world: the page speaks of it, and does not ask for it."""
_COMMAND = re.compile(r"`(skerry [^`]+)`")
_ALERT = re.compile(r"\bSkerry[A-Z]\w+")
_LISTENS = re.compile(r'"Listening on" address=([0-9.:]+)')
_VALUE = re.compile(r"\b[A-Z]{2,}\b")


@dataclass(frozen=True, slots=True)
class Section:
    """Every `skerry …` of it, each once, and the alerts that it names."""

    commands: tuple[str, ...]
    alerts: tuple[str, ...]


def sections_of(page: str) -> dict[str, Section]:
    """By title."""
    found: dict[str, Section] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        text = re.sub(r"\s+", " ", body)
        told = dict.fromkeys(_COMMAND.findall(text))
        commands = tuple(one for one in told if one != RUNNING)
        found[title] = Section(commands, tuple(dict.fromkeys(_ALERT.findall(text))))
    return found


def rules() -> set[str]:
    """The alerts that we ship."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"]}


class Operator:
    """Knows one section of the page and nothing else. `home`: the folder where the world was
    started, so that commands without options mean it."""

    def __init__(self, section: Section, home: Path) -> None:
        self._home = home
        self._commands = section.commands
        self.left = list(section.commands)
        """Commands of the section that were not run yet."""
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(self, command: str, **values: object) -> str:
        """One of the page's commands with its words in capitals filled in: what it prints."""
        done = subprocess.run(
            self._line(command, values), cwd=self._home, env=self._environment,
            capture_output=True, text=True, check=False, timeout=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    @contextmanager
    def running(self, command: str, **values: object) -> Iterator[subprocess.Popen[bytes]]:
        """The same of a command that goes on until it is ended."""
        process = subprocess.Popen(
            self._line(command, values), cwd=self._home, env=self._environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _line(self, command: str, values: Mapping[str, object]) -> list[str]:
        assert command in self._commands, f"the section has {self._commands}"
        if command in self.left:
            self.left.remove(command)
        wanted = set(_VALUE.findall(command))
        assert wanted == set(values), f"{command} has {wanted}"
        words = [str(values.get(word, word)) for word in command.split()[1:]]
        return [sys.executable, "-m", "deploy.cli", *words]


class Monitor:
    """A Prometheus of a world."""

    def __init__(self, base: str) -> None:
        self._http = httpx.Client(base_url=base, timeout=5, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def watched(self) -> int:
        """Of the world's processes, how many answer it."""
        found = self._http.get("/api/v1/query", params={"query": "up == 1"}).json()
        return len(found["data"]["result"])

    def raised(self) -> set[str]:
        """Alerts whose condition holds now."""
        told = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in told}

    def raises(self, alert: str, within_s: float = PATIENCE_S) -> bool:
        return until(lambda: alert in self.raised(), within_s)

    def calms(self, alert: str, within_s: float = PATIENCE_S) -> bool:
        return until(lambda: alert not in self.raised(), within_s)


@contextmanager
def watching(folder: Path, addresses: Sequence[str]) -> Iterator[Monitor]:
    """`addresses`: HOST:PORT of all edges and routers."""
    program = needed("prometheus")
    folder.mkdir()
    (folder / "alerts.yml").write_text(hurried(RULES.read_text(encoding="utf-8")), "utf-8")
    described = {
        "global": {"scrape_interval": f"{int(SCRAPE_S * 1000)}ms",
                   "scrape_timeout": f"{int(SCRAPE_S * 1000)}ms",
                   "evaluation_interval": f"{int(SCRAPE_S * 1000)}ms"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "world", "static_configs": [{"targets": list(addresses)}]}
        ],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(yaml.safe_dump(described), "utf-8")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "--config.file", str(folder / "prometheus.yml"),
             "--storage.tsdb.path", str(folder / "data"),
             "--web.listen-address", "127.0.0.1:0"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        with closing(Monitor(f"http://{_address(folder / 'log')}")) as monitor:
            assert until(lambda: monitor.watched() == len(addresses))
            yield monitor
    finally:
        process.terminate()
        process.wait(15)


def _address(log: Path) -> str:
    """Where it listens, once it does."""
    found: list[str] = []

    def listens() -> bool:
        found.extend(_LISTENS.findall(log.read_text("utf-8", "replace")))
        return bool(found)

    assert until(listens), log.read_text("utf-8", "replace")[-2000:]
    return found[0]


def hurried(rules: str) -> str:
    """The rules with minutes of `MINUTE_S` seconds, and without a wait until they are told."""
    told: dict[str, Any] = yaml.safe_load(rules)
    for one in (rule for group in told["groups"] for rule in group["rules"]):
        one["expr"] = re.sub(
            r"\[(\d+)m\]", lambda found: f"[{int(found[1]) * MINUTE_S}s]", one["expr"]
        )
        one.pop("for", None)
    return str(yaml.safe_dump(told))


class Crowd:
    """So many who ask one question after the other until the block ends. `pause_s`: so that an edge
    that keeps its last thousand requests still knows one when a command asks for it."""

    def __init__(
        self,
        base: str,
        prompts: Callable[[int], str],
        *,
        count: int,
        tokens: int,
        key: str = "",
        pause_s: float = 0.0,
    ) -> None:
        self.answers: list[Answer] = []
        self.failures: list[httpx.HTTPError] = []
        self._base = base
        self._prompts = prompts
        self._tokens = tokens
        self._pause_s = pause_s
        self._headers = bearer(key)
        self._turns = itertools.count()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    @property
    def good(self) -> bool:
        """Whether every request was answered, and wholly."""
        return not self.failures and all(one.done and one.error is None for one in self.answers)

    def more(self, count: int) -> list[Answer]:
        """The next `count` answers."""
        before = len(self.answers)
        assert until(lambda: len(self.answers) >= before + count), self.failures
        return self.answers[before:]

    def _ask(self) -> None:
        with httpx.Client(
            base_url=self._base, headers=self._headers, timeout=60, trust_env=False, verify=PLAIN
        ) as client:
            while not self._over.is_set():
                body = completion(self._prompts(next(self._turns)), max_tokens=self._tokens)
                try:
                    self.answers.append(ask(self._base, body, client=client))
                except httpx.HTTPError as error:
                    self.failures.append(error)
                    return
                self._over.wait(self._pause_s)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
