"""Each party of a request killed or stopped at each step of its hand-off, one cell at a time.

A cell has two callers: one whose answer is being written, and one whose prompt stands at the step
that the cell names. Steps are held, not hoped for: the rank that would go on is stopped.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx

from core.errors import BY_CODE
from deploy.launcher import LocalWorld
from tests.world.faults import alive, forgotten, until
from tests.world.scripted import Answer, completion, lines_of, region_status, streaming, take

SHORT, LONG = 600, 2000
"""Characters of prompts, about as many tokens: read in a sixth of a second and in half of one."""
FEW = 30
STALE_S = 0.6
"""After it a heartbeat has told how it is: there are four in a second."""
_numbers = itertools.count(1)


class Party(StrEnum):
    EDGE = "edge"
    ROUTER = "router"
    PREFILL = "prefill front"
    PREFILL_RANK = "prefill rank"
    DECODE = "decode front"
    DECODE_RANK = "decode rank"


class Step(StrEnum):
    """Where the second caller's hand-off stands."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    READY = "ready"
    DECODING = "decoding"
    """Both are being answered."""


class Fault(StrEnum):
    KILL = "kill"
    STOP = "stop"
    """Stopped until it is missed, where anybody misses it, and woken."""


@dataclass(frozen=True)
class Cell:
    party: Party
    fault: Fault
    step: Step

    def __str__(self) -> str:
        return f"{self.fault} the {self.party}, {self.step}"


@dataclass(frozen=True)
class Place:
    """A region, the edge that its callers come in by, an affinity id at home there."""

    region: str
    edge: str
    key: str


class Call(threading.Thread):
    """A caller. `answer` fills while it listens; `cut` when its connection broke."""

    def __init__(self, url: str, body: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self.answer = Answer(0, httpx.Headers())
        self.cut = False
        self.failure: BaseException | None = None
        self.prompt = str(body["prompt"])
        self._url, self._body = url, body
        self.start()

    def run(self) -> None:
        try:
            with streaming(self._url, self._body) as response:
                self.answer.status, self.answer.headers = response.status_code, response.headers
                if response.status_code != 200:
                    response.read()
                    self.answer.error = response.json()["error"]
                    return
                for line in lines_of(response):
                    take(self.answer, line)
        except httpx.TransportError:
            self.cut = True
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self.failure = error

    def end(self, within_s: float = 30.0) -> Answer:
        self.join(within_s)
        assert not self.is_alive(), f"no answer and no error after {within_s:g} s"
        if self.failure is not None:
            raise self.failure
        return self.answer

    def check(self) -> bool:
        """Whether the answer is whole. Fails unless it is that or an error with a name, and what
        came of it is the text's beginning."""
        answer = self.end()
        assert self.prompt.startswith(answer.text), "text that is not the greedy one"
        if self.cut:
            assert not answer.done
            return False
        if answer.error is None:
            assert answer.status == 200
            assert answer.done
            assert answer.text == self.prompt or answer.finish == "length"
            return True
        assert not answer.done
        assert answer.finish is None
        assert answer.error["code"] in BY_CODE, answer.error
        assert answer.error["code"] not in {"internal_error", "invalid_request"}, answer.error
        return False


def play(world: LocalWorld, at: Place, cell: Cell) -> tuple[Call, Call]:
    """The cell, until both callers have heard their end and the region is whole and empty again:
    the one that was being answered, and the other."""
    with ExitStack() as stopped:
        writing = ask(world, at, "writing", SHORT, SHORT)
        assert until(lambda: bool(writing.answer.text)), (cell, writing.answer)
        other = writing
        if cell.step is Step.DECODING:
            other = ask(world, at, "writing too", SHORT, SHORT)
            assert until(lambda: bool(other.answer.text)), (cell, other.answer)
        else:
            other = _held(world, at, cell.step, stopped)
        with _struck(world, at, cell):
            stopped.close()
        for call in (writing, other):
            call.end()
    region = at.region
    assert until(lambda: alive(world, region)), f"{cell}: {region} did not come back"
    assert until(lambda: forgotten(world, region)), f"{cell}: {region_status(world, region)}"
    return writing, other


def ask(world: LocalWorld, at: Place, name: str, size: int, most: int) -> Call:
    """About `size` tokens of prompt, answered with at most `most`."""
    prompt = f"{name} {next(_numbers)}: " + "sea, sky and stones. " * (size // 21)
    body = completion(prompt, prompt_cache_key=at.key, max_tokens=most)
    return Call(world.edges[at.edge], body)


def node(world: LocalWorld, name: str, region: str) -> dict[str, Any]:
    found = (one for one in region_status(world, region)["nodes"] if one["name"] == name)
    return next(found)


def _held(world: LocalWorld, at: Place, step: Step, stopped: ExitStack) -> Call:
    """A caller whose hand-off stands at `step` until `stopped` is closed."""
    reader, writer = f"{at.region}-prefill", f"{at.region}-decode"

    def figure(name: str, what: str) -> int:
        return _figure(world, name, at.region, what)

    computed, sent = figure(reader, "computed_prompt_tokens"), figure(reader, "kv_bytes_sent")
    if step is Step.RESERVED:
        stopped.enter_context(stopped_rank(world, reader, at.region))
    call = ask(world, at, step, LONG, FEW)
    if step is Step.RECEIVING:
        while not _half_read(world, at, computed, stopped):
            call.end()  # that one was read before it could be stopped
            computed = figure(reader, "computed_prompt_tokens")
            call = ask(world, at, step, LONG, FEW)
        return call
    while not _full(lambda: figure(writer, "blocks_used") >= LONG // 20, call):
        call = ask(world, at, step, LONG, FEW)  # that one was over before anybody looked
    stopped.enter_context(stopped_rank(world, writer, at.region))
    if step is Step.READY:
        assert until(lambda: figure(reader, "kv_bytes_sent") > sent)
    return call


def _half_read(world: LocalWorld, at: Place, computed: int, stopped: ExitStack) -> bool:
    """Whether the reader, which had computed so many tokens, was stopped in the middle of a prompt;
    with it the writer."""
    reader, writer = f"{at.region}-prefill", f"{at.region}-decode"
    assert until(lambda: _figure(world, reader, at.region, "computed_prompt_tokens") > computed)
    with ExitStack() as both:
        both.enter_context(stopped_rank(world, reader, at.region))
        both.enter_context(stopped_rank(world, writer, at.region))
        time.sleep(STALE_S)
        if not _figure(world, reader, at.region, "prefill_backlog_tokens"):
            return False
        stopped.push(both.pop_all())
    return True


def _figure(world: LocalWorld, name: str, region: str, what: str) -> int:
    return int(node(world, name, region).get(what, 0))


def _full(holds: Callable[[], bool], call: Call) -> bool:
    """Whether the writer holds more than answers do, before the call is over."""
    assert until(lambda: holds() or call.answer.done), "it neither got room nor an answer"
    return not call.answer.done


@contextmanager
def stopped_rank(world: LocalWorld, name: str, region: str) -> Iterator[None]:
    pid = rank_pid(world, name, region)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def rank_pid(world: LocalWorld, name: str, region: str) -> int:
    return int(node(world, name, region)["ranks"][0]["pid"])


@contextmanager
def _struck(world: LocalWorld, at: Place, cell: Cell) -> Iterator[None]:
    """The party has been struck and, where it was only stopped, is woken at the end."""
    pid, missed = _target(world, at, cell.party)
    if cell.fault is Fault.KILL:
        os.kill(pid, signal.SIGKILL)
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
        if missed is not None:
            assert until(missed), f"{cell}: nobody misses it"
        else:
            time.sleep(0.3)  # nobody is to miss it so soon
    finally:
        os.kill(pid, signal.SIGCONT)


def _target(world: LocalWorld, at: Place, party: Party) -> tuple[int, Callable[[], bool] | None]:
    """Whom the fault strikes, and how one sees that it is missed; None: not within seconds."""
    side = "prefill" if party in (Party.PREFILL, Party.PREFILL_RANK) else "decode"
    name = f"{at.region}-{side}"
    match party:
        case Party.EDGE:
            return world.pid(at.edge), None
        case Party.ROUTER:
            return world.pid(at.region), None
        case Party.PREFILL_RANK | Party.DECODE_RANK:
            return rank_pid(world, name, at.region), None
        case _:
            return world.pid(name), lambda: not node(world, name, at.region).get("alive", True)
