"""The rounds of a run: every contestant in turn for each measure, the order changing by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

from loadtest.bench import timing, workload
from loadtest.bench.figures import OURS, SPECULATING
from loadtest.bench.llama import Llama
from loadtest.bench.workers import ContestantFailed, Worker
from loadtest.bench.workload import Mix, Request

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a contestant has."""

    play_s: float = 120.0
    mixed_s: float = 240.0
    start_s: float = 60.0


@dataclass(slots=True)
class Contestants:
    """Whoever is there. One that fails is closed and left out from then on."""

    workers: dict[str, Worker]
    llama: Llama | None
    vocabulary: int
    say: Say
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def note(self, measure: str, name: str, value: float) -> None:
        self.samples.setdefault(measure, {}).setdefault(name, []).append(value)
        self.say(f"    {measure:16} {name:20} {value:10.3f}")

    def play(self, name: str, requests: Sequence[Request], limit_s: float) -> timing.Times:
        worker = self.workers[name]
        with worker.turn():
            return worker.play(requests, limit_s)

    @contextmanager
    def bounded(self, name: str) -> Iterator[None]:
        """A failure ends this contestant's part in the run, not the run; times that make no rate
        end one figure."""
        try:
            yield
        except ContestantFailed as error:
            self.failures[name] = str(error)
            self.say(f"    {name} drops out: {error}")
            worker = self.workers.pop(name, None)
            if worker is not None:
                worker.close()
            if self.llama is not None and name == self.llama.name:
                self.llama = None
        except ValueError as error:
            self.say(f"    {name}: no figure: {error}")


def rates(group: Contestants, number: int, batches: Sequence[int], limits: Limits) -> None:
    """Decode at each batch size, and prefill: everybody."""
    for size in batches:
        requests = workload.batch(_random("decode", number, size), size, group.vocabulary)
        for name in _order(group, number):
            with group.bounded(name):
                if group.llama is not None and name == group.llama.name:
                    rate = group.llama.decode(size, limits.play_s)
                else:
                    rate = _decode(group, name, requests, limits.play_s)
                group.note(f"decode {size}", name, rate)
    requests = workload.prefill(_random("prefill", number, 0), group.vocabulary)
    for name in _order(group, number):
        with group.bounded(name):
            if group.llama is not None and name == group.llama.name:
                rate = group.llama.prefill(limits.play_s)
            else:
                rate = workload.PREFILL / group.play(name, requests, limits.play_s)[0][0]
            group.note("prefill 1024", name, rate)


def _decode(group: Contestants, name: str, requests: Sequence[Request], limit_s: float) -> float:
    """Read the prompts first, so that engines with a prefix cache begin to decode all at once."""
    group.play(name, [replace(request, tokens=1) for request in requests], limit_s)
    return timing.steady(group.play(name, requests, limit_s))


def mixed(group: Contestants, number: int, mix: Mix, limits: Limits) -> None:
    """Requests that arrive on their own: ours and vLLM, the same arrivals for both."""
    requests = workload.mixed(_random("mixed", number, 0), mix, group.vocabulary)
    for name in _turned([n for n in (OURS, "vllm") if n in group.workers], number):
        with group.bounded(name):
            times = group.play(name, requests, limits.mixed_s)
            group.note("mixed tokens/s", name, timing.throughput(times))
            group.note("mixed p99 ms", name, 1e3 * timing.percentile(timing.gaps(times), 0.99))


def repeat(group: Contestants, number: int, limits: Limits) -> None:
    """Text that stands in the prompt already: ours with and without speculation."""
    text = workload.agent_text(_random("repeat", number, 0))
    for name in _turned([n for n in (OURS, SPECULATING) if n in group.workers], number):
        with group.bounded(name):
            worker = group.workers[name]
            with worker.turn():
                ids = worker.encode(text)
                times = worker.play([Request(0.0, ids, workload.REPEATED)], limits.play_s)
            group.note("repeat", name, timing.steady(times))


def starts(group: Contestants, start: Callable[[], Worker], limits: Limits) -> None:
    """From the start of a process to the first token: ours in a fresh process, and llama.cpp."""
    with group.bounded("start of ours"):
        began = time.perf_counter()
        worker = start()
        try:
            worker.play([Request(0.0, tuple(range(100, 105)), 1)], limits.start_s)
            group.note("start", OURS, time.perf_counter() - began)
        finally:
            worker.close()
    if group.llama is not None:
        with group.bounded(group.llama.name):
            group.note("start", group.llama.name, group.llama.start(limits.start_s))


def _order(group: Contestants, number: int) -> list[str]:
    names = [name for name in group.workers if name != SPECULATING]
    if group.llama is not None:
        names.append(group.llama.name)
    return _turned(names, number)


def _turned(names: list[str], number: int) -> list[str]:
    """Who goes first changes: whatever grows warm or slow must not favour one."""
    first = number % len(names) if names else 0
    return names[first:] + names[:first]


def _random(measure: str, number: int, size: int) -> Random:
    return Random(f"{measure} {number} {size}")
