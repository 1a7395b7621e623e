"""How a node front takes leave, signal by signal, without ranks or routers."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field

from core.errors import NodeLost, RequestError
from core.orders import RETIRE
from regional.node.app import DRAIN_GRACE_S, HURRIED_GOODBYE_S, until_the_end
from regional.node.stopping import Stopping


@dataclass
class Stage:
    """Front and sessions at once: what they were told, in order."""

    said: list[str] = field(default_factory=list)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    reads: bool = True
    """Whether routers read what is said at last."""

    def close(self) -> None:
        self._note("close")

    def drain(self, grace_s: float) -> None:
        self._note(f"drain {grace_s:g}")

    def beat(self) -> None:
        self._note("beat")

    def give_up(self, error: RequestError) -> None:
        self._note("give up")

    def fail_all(self, error: RequestError) -> None:
        self._note("fail all")

    async def leave(self, reason: str, *, timeout_s: float) -> None:
        self._note(f"leave, {reason}")
        if not self.reads:
            await asyncio.sleep(timeout_s)
            self._note("leave without a word")

    async def heard(self, count: int) -> None:
        """So many things have been said."""
        async with asyncio.timeout(30):
            while len(self.said) < count:
                self.news.clear()
                await self.news.wait()

    def _note(self, what: str) -> None:
        self.said.append(what)
        self.news.set()


async def never() -> NodeLost:
    await asyncio.Event().wait()
    return NodeLost("never")


def begin(stage: Stage, *, longest_s: float = 60.0) -> asyncio.Task[int]:
    end = until_the_end(
        stage,  # type: ignore[arg-type] # stands in for the front
        stage,  # type: ignore[arg-type] # and for its sessions
        never(),
        Stopping(),
        longest_s,
    )
    return asyncio.create_task(end)


def signalled(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


CLOSED = ["close", "beat"]
DRAINED = [f"drain {DRAIN_GRACE_S:g}", "beat"]
GONE = ["give up", "leave, stopped"]


def test_a_retired_one_waits_for_its_last_answer_and_for_nothing_else() -> None:
    async def test() -> None:
        stage = Stage()
        end = begin(stage)
        await asyncio.sleep(0)
        signalled(RETIRE)
        await stage.heard(2)
        assert stage.said == CLOSED, "nothing is given up while something runs"
        stage.idle.set()
        assert await end == 0
        assert stage.said == [*CLOSED, *DRAINED, *GONE]

    asyncio.run(test())


def test_not_longer_than_an_answer_may_take() -> None:
    async def test() -> None:
        stage = Stage()
        end = begin(stage, longest_s=0.05)
        await asyncio.sleep(0)
        signalled(RETIRE)
        await stage.heard(4)
        assert stage.said == [*CLOSED, *DRAINED]
        stage.idle.set()
        assert await end == 0

    asyncio.run(test())


def test_a_retired_one_can_still_be_told_to_stop_and_to_hurry() -> None:
    async def test() -> None:
        stage = Stage()
        end = begin(stage)
        await asyncio.sleep(0)
        signalled(RETIRE)
        await stage.heard(2)
        signalled(signal.SIGTERM)
        await stage.heard(4)
        assert stage.said == [*CLOSED, *DRAINED]
        signalled(signal.SIGTERM)
        assert await end == 0
        assert stage.said[4:] == GONE

    asyncio.run(test())


def test_routers_have_time_to_read_the_last_words_unless_somebody_is_in_a_hurry() -> None:
    async def test() -> None:
        stage = Stage(reads=False)
        stage.idle.set()
        end = begin(stage)
        await asyncio.sleep(0)
        signalled(RETIRE)
        await stage.heard(6)
        assert stage.said == [*CLOSED, *DRAINED, *GONE]
        await asyncio.wait({end}, timeout=2 * HURRIED_GOODBYE_S)
        assert not end.done(), "a router on a busy machine takes its time"
        signalled(signal.SIGTERM)
        signalled(signal.SIGTERM)
        assert await end == 0
        assert stage.said == [*CLOSED, *DRAINED, *GONE], "cut short"

    asyncio.run(test())


def test_what_is_asked_to_retire_while_it_loads_does_not_load_on() -> None:
    async def test() -> None:
        stop = Stopping()
        loading = asyncio.create_task(stop.unless_stopped(never()))
        await asyncio.sleep(0)
        signalled(RETIRE)
        async with asyncio.timeout(30):
            assert await loading is None

    asyncio.run(test())
