"""What a Worker that loops costs its neighbour: while its first loop runs, and while somebody asks
it all the time, so that it loops, is ended, rests, and loops again.

A process of the lowest priority that has nothing to do with Workers, for as long and by the same
turns, says what of it is the machine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.edge.rounds import quantile
from loadtest.workers.cast import TURN_S, Edge
from loadtest.workers.rounds import Caller, calling, looping, spinning
from loadtest.workers.scripts import LOOPS

NEIGHBOUR = "/w/asks/"
LOOK_S = 0.5 * TURN_S
"""Of each turn; a loop is ended after it."""
AGAIN_S = 0.1
RESTS_S = (AGAIN_S, 1.0, 4.0, 16.0, 60.0)
"""After its ends, one after the other, as edges let Workers rest."""
TARGET, FLOOR = 1.1, 1.25
Samples = dict[str, dict[str, list[float]]]
Say = Callable[[str], None]


def first_loop(edge: Edge, rounds: int, samples: Samples, say: Say) -> Figure:
    """p99 of a Worker from the question that makes another one loop until that one is ended, over
    its p99 in peace: by turns, the loop's Worker deployed anew each time."""
    calm: list[float] = []
    beside: list[float] = []
    control: list[float] = []
    with calling(edge.port) as caller:
        caller.times(NEIGHBOUR, 50)
        for _ in range(rounds):
            edge.deploy((LOOPS,))
            calm.append(_p99(caller, nullcontext(), LOOK_S))
            control.append(_p99(caller, spinning(), LOOK_S))
            beside.append(_p99(caller, looping(edge, LOOPS.name), LOOK_S))
            _wait_for_end(edge)
    return _figure("while its first loop runs", calm, beside, control, samples, say)


def steady(edge: Edge, seconds: float, samples: Samples, say: Say) -> Figure:
    """The same over `seconds` from the first question on, with somebody who asks the Worker that
    loops all the time, also while it rests."""
    edge.deploy((LOOPS,))
    with calling(edge.port) as caller:
        caller.times(NEIGHBOUR, 50)
        calm = [_p99(caller, nullcontext(), seconds / 4)]
        before = len(edge.told(LOOPS.name))
        beside = [_p99(caller, looping(edge, LOOPS.name), seconds)]
        ends = sum(line.startswith("ended: ") for line in edge.told(LOOPS.name)[before:])
        calm.append(_p99(caller, nullcontext(), seconds / 4))
        control = [_p99(caller, _spinning_by_turns(), seconds)]
    say(f"in {seconds:g} s of questions it was ended {ends} times")
    what = f"over {seconds:g} s in which it is asked all the time"
    return _figure(what, [median(calm)], beside, control, samples, say)


def _p99(caller: Caller, meanwhile: AbstractContextManager[None], seconds: float) -> float:
    times: list[float] = []
    with meanwhile:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            times.append(caller.ask(NEIGHBOUR))
    return quantile(times, 0.99)


def _wait_for_end(edge: Edge) -> None:
    end = time.monotonic() + 3 * TURN_S
    while not edge.told(LOOPS.name)[-1].startswith("ended: "):
        if time.monotonic() > end:
            return
        time.sleep(0.1)


@contextmanager
def _spinning_by_turns() -> Iterator[None]:
    """As long as a Worker loops, then as long as it rests."""
    over = threading.Event()

    def turns() -> None:
        for rest_s in RESTS_S:
            with spinning():
                over.wait(TURN_S)
            if over.wait(rest_s):
                return

    thread = threading.Thread(target=turns, name="turns")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _figure(
    what: str,
    calm: Sequence[float],
    beside: Sequence[float],
    control: Sequence[float],
    samples: Samples,
    say: Say,
) -> Figure:
    samples[f"a Worker's call, p99, ms, {what}"] = {
        "in peace": list(calm),
        "beside a loop": list(beside),
        "beside any process at nice 19": list(control),
    }
    ratio, machine = (
        median([one / other for one, other in zip(many, calm, strict=True)])
        for many in (beside, control)
    )
    about = (
        f"{median(beside):.2f} against {median(calm):.2f} ms; beside any process at nice 19"
        f" {machine:.2f} ×"
    )
    say(f"p99 beside a Worker that loops, {what}: {ratio:.2f} × ({about})")
    name = f"p99 of a Worker beside one that loops / in peace, {what}"
    return Figure(name, ratio, "×", TARGET, FLOOR, about)
