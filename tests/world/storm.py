"""A crowd asks, and processes are killed or stopped at random: what came of every answer.

A seed fixes who asks what and who is struck when; what the machine makes of it is its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import aiohttp
import httpx
import psutil

from core.errors import BY_CODE
from core.types import Usage
from core.usage import UsageReader
from deploy.launcher import LocalWorld
from tests.world.faults import until
from tests.world.scripted import Answer, take

NEVER = {"internal_error", "invalid_request", "context_length_exceeded"}
"""Errors that no fault of a process explains."""
DOWN = 2
"""So many of those struck last may be down at once: a world that is all dead proves nothing."""
PATIENCE_S = 60.0
STARTING_S = 10.0
"""An edge that was killed is up again after this, on a machine that has much else to do."""


@dataclass(frozen=True)
class Question:
    """`path` and body of a request, and its whole answer where nothing fails. `cut`: the answer may
    also be the first tokens of that, ended by a limit."""

    path: str
    body: dict[str, object]
    text: str
    cut: bool = False


@dataclass(frozen=True)
class Victim:
    """`rank`: not the process of that name, but one of its ranks."""

    name: str
    rank: bool = False

    def __str__(self) -> str:
        return f"a rank of {self.name}" if self.rank else self.name


@dataclass
class Report:
    """What happened. `wrong` is empty, or the storm has found a mistake."""

    seed: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    told: dict[str, Usage] = field(default_factory=dict)
    """The usage that callers were sent, by request id."""

    def __str__(self) -> str:
        lines = [
            f"{self.faults.total()} faults under {self.outcomes.total()} requests in"
            f" {self.seconds:.0f} s; SKERRY_SOAK_SEED={self.seed} plays them again",
            "  answers  " + ", ".join(f"{n} {what}" for what, n in self.outcomes.most_common()),
            "  struck   " + ", ".join(f"{n} × {what}" for what, n in sorted(self.faults.items())),
        ]
        return "\n".join([*lines, *(f"  WRONG    {one}" for one in self.wrong)])


class Storm:
    """`victims` are struck `faults` times, the last one before `within_s` have passed."""

    def __init__(
        self,
        world: LocalWorld,
        questions: Callable[[random.Random], Question],
        victims: Sequence[Victim],
        *,
        seed: int,
        faults: int,
        callers: int,
        within_s: float,
        pause_s: tuple[float, float] = (0.05, 0.6),
        stop_s: tuple[float, float] = (0.05, 2.5),
    ) -> None:
        self.report = Report(seed)
        self._world = world
        self._questions = questions
        self._victims = victims
        self._faults = faults
        self._callers = callers
        self._within_s = within_s
        self._pause_s, self._stop_s = pause_s, stop_s
        self._over = asyncio.Event()
        self._edge_deaths: dict[str, list[float]] = {name: [] for name in world.edges}

    async def run(self) -> Report:
        """Callers that wait when the last fault has struck are waited for."""
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
            for number in range(self._callers):
                dice = random.Random(f"{self.report.seed} caller {number}")
                group.create_task(self._ask_on(http, dice))
            await self._strike_on(random.Random(f"{self.report.seed} faults"), group)
            self._over.set()
        self.report.seconds = time.monotonic() - began
        return self.report

    # ------------------------------------------------------------ callers

    async def _ask_on(self, http: aiohttp.ClientSession, dice: random.Random) -> None:
        edges = list(self._world.edges)
        while not self._over.is_set():
            question = self._questions(dice)
            leaves = dice.random() < 0.1
            outcome = await self._ask(http, edges[0], question, leaves=leaves)
            self.report.outcomes[outcome] += 1
            if outcome not in ("whole", "left"):
                await asyncio.sleep(dice.uniform(0.1, 0.5))  # as a client would
                dice.shuffle(edges)

    async def _ask(
        self, http: aiohttp.ClientSession, edge: str, question: Question, *, leaves: bool
    ) -> str:
        answer = Answer(0, httpx.Headers())
        began = time.monotonic()
        url = self._world.edges[edge] + question.path
        try:
            async with http.post(url, json=question.body) as response:
                answer.status = response.status
                answer.headers = httpx.Headers(dict(response.headers))
                if response.status != 200 or not question.body.get("stream"):
                    self._whole(answer, json.loads(await response.read()))
                else:
                    async for line in response.content:
                        take(answer, line.decode().rstrip("\n"))
                        if leaves and answer.text:
                            break
        except TimeoutError:
            self._wrong(question, answer, f"neither answer nor error in {PATIENCE_S:g} s")
            return "nothing"
        except aiohttp.ClientConnectorError:
            self._cut(question, answer, edge, began)
            return "found no edge"
        except (aiohttp.ClientError, json.JSONDecodeError):
            return self._cut(question, answer, edge, began)
        if leaves and not answer.done and answer.text:
            return "left"
        if answer.error is None and not answer.done:
            return self._cut(question, answer, edge, began)
        return self._judge(question, answer)

    def _whole(self, answer: Answer, body: dict[str, object]) -> None:
        """Of an answer, or an error, in one piece."""
        if answer.status == 200:
            take(answer, "data: " + json.dumps(_as_chunk(body)))
            answer.done = True
        else:
            error = body["error"]
            assert isinstance(error, dict)
            answer.error = error

    def _cut(self, question: Question, answer: Answer, edge: str, began: float) -> str:
        """Without an end: right only where the edge has died, or was still coming up."""
        self._check_text(question, answer)
        if not any(died > began - STARTING_S for died in self._edge_deaths[edge]):
            self._wrong(question, answer, f"{edge} lives and gave neither an end nor an error")
        return "cut"

    def _check_text(self, question: Question, answer: Answer) -> None:
        text = answer.text
        if question.cut and answer.finish == "length":
            text = text.rstrip("\ufffd")  # the limit fell into a character
        if not question.text.startswith(text):
            self._wrong(question, answer, f"text that is not its answer: {answer.text[-80:]!r}")

    def _judge(self, question: Question, answer: Answer) -> str:
        self._check_text(question, answer)
        if answer.error is not None:
            code = str(answer.error["code"])
            if code not in BY_CODE or code in NEVER:
                self._wrong(question, answer, f"the error {answer.error}")
            if answer.done or answer.finish:
                self._wrong(question, answer, "both an error and an end")
            return code
        whole = answer.text == question.text or (question.cut and answer.finish == "length")
        if not whole or answer.usage is None:
            self._wrong(question, answer, "an end before the end")
            return "short"
        self.report.told |= told([answer])
        return "whole"

    def _wrong(self, question: Question, answer: Answer, why: str) -> None:
        request = answer.headers.get("x-request-id", "?")
        at = [answer.headers.get(f"x-skerry-{one}", "?") for one in ("region", "prefill", "decode")]
        self.report.wrong.append(f"{request} at {'/'.join(at)}: {why}")

    # ------------------------------------------------------------ faults

    async def _strike_on(self, dice: random.Random, group: asyncio.TaskGroup) -> None:
        end = time.monotonic() + self._within_s
        struck: list[Victim] = []
        while (number := self.report.faults.total()) < self._faults:
            await asyncio.sleep(dice.uniform(*self._pause_s))
            victim, kills = dice.choice(self._victims), dice.random() < 0.6
            stop_s = dice.uniform(*self._stop_s)
            rest = [one for one in self._victims if one in struck[-DOWN:]]
            await asyncio.to_thread(until, partial(self._all_up, rest), PATIENCE_S)
            pid = self._pid(victim, dice)
            if pid is None:
                continue
            self.report.faults[f"{'kill' if kills else 'stop'} {victim}"] += 1
            struck.append(victim)
            if kills and victim.name in self._world.edges:
                self._edge_deaths[victim.name].append(time.monotonic())
            _signal(pid, signal.SIGKILL if kills else signal.SIGSTOP)
            if not kills:
                group.create_task(_wake(pid, stop_s))
            if time.monotonic() > end:
                self.report.wrong.append(f"only {number + 1} faults in {self._within_s:g} s")
                return

    def _all_up(self, victims: Sequence[Victim]) -> bool:
        return all(self._pid(one, random.Random(0)) is not None for one in victims)

    def _pid(self, victim: Victim, dice: random.Random) -> int | None:
        with suppress(psutil.Error):
            process = psutil.Process(self._world.pid(victim.name))
            pids = [one.pid for one in (process.children() if victim.rank else [process])]
            return int(dice.choice(pids)) if pids else None
        return None


def told(answers: Iterable[Answer]) -> dict[str, Usage]:
    """The usage that callers were sent, by request id."""
    return {
        one.headers["x-request-id"]: Usage(
            prompt_tokens=one.usage["prompt_tokens"],
            completion_tokens=one.usage["completion_tokens"],
            cached_tokens=one.usage["prompt_tokens_details"]["cached_tokens"],
        )
        for one in answers
        if one.usage is not None
    }


def at_rest(world: LocalWorld) -> str:
    """What is still held, somewhere in the world, a while after the last request; "" is nothing."""
    found = ""

    def nothing() -> bool:
        nonlocal found
        found = _held(world)
        return not found

    until(nothing, PATIENCE_S)
    return found


def _held(world: LocalWorld) -> str:
    doors = [door for region in world.world.topology.regions for door in region.doors]
    for name, door in doors:
        page = httpx.get(f"http://{door.http}/status", timeout=5, trust_env=False)
        status = page.json()
        if status.get("active", 0):
            return f"{name} has {status['active']} requests"
        for one in status["nodes"]:
            if not one["alive"] or one.get("blocks_used", 0):
                return f"{one['name']} is {'up' if one['alive'] else 'down'}: {one}"
    for name, edge in world.edges.items():
        page = httpx.get(f"{edge}/status", timeout=5, trust_env=False).json()
        if page["in_flight"] or page["held"]:
            return f"{name} has {page['in_flight']} requests and holds {page['held']}"
    return ""


def unlike(world: LocalWorld, sent: dict[str, Usage]) -> list[str]:
    """Requests whose ledger does not say once, and alike, what their callers were `sent`."""
    records = Counter[str]()
    written: dict[str, Usage] = {}
    for record in UsageReader().read(world.world.state / "usage"):
        records[record.id] += 1
        if record.complete:
            written[record.id] = record.usage
    wrong = [f"{one} is written {count} times" for one, count in records.items() if count > 1]
    return wrong + [
        f"{one} was told {usage} and {written.get(one)} is written"
        for one, usage in sent.items()
        if written.get(one) != usage
    ]


def _as_chunk(body: dict[str, object]) -> dict[str, object]:
    choices = body["choices"]
    assert isinstance(choices, list)
    return {**body, "choices": [{**one, "delta": one.get("message", {})} for one in choices]}


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


async def _wake(pid: int, after_s: float) -> None:
    await asyncio.sleep(after_s)
    _signal(pid, signal.SIGCONT)
