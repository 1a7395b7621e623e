"""What all workers of an edge say together, told by whichever of them is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from core.metrics import render
from core.story import Kept, Story, StoryPage
from edge.admission import Admission
from edge.crew.merge import merge
from edge.crew.seat import Seat
from edge.crew.siblings import Siblings
from edge.hold import Hold
from edge.journal import Recent

METRICS, WORKER, STORIES = "/internal/v1/metrics", "/internal/v1/worker", "/internal/v1/stories"
OWN_ORDERS = "/internal/v1/worker/orders"
"""What workers ask of each other."""

_Page = TypeVar("_Page", bound=msgspec.Struct)


class WorkerPage(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process."""

    number: int
    pid: int
    uptime_s: float
    in_flight: int
    held: int
    draining: bool


class Chorus:
    """`own`: what only this worker counts; `shared`: what each of them sees of the same world."""

    def __init__(
        self,
        edge: str,
        seat: Seat,
        *,
        siblings: Siblings,
        own: CollectorRegistry,
        shared: CollectorRegistry,
        admission: Admission,
        hold: Hold,
        recent: Recent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._edge = edge
        self._seat = seat
        self._siblings = siblings
        self._own = own
        self._shared = shared
        self._admission = admission
        self._hold = hold
        self._recent = recent
        self._clock = clock
        self._started = clock()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started

    def own_metrics(self) -> bytes:
        return render(self._own)

    def own_worker(self) -> WorkerPage:
        return WorkerPage(
            number=self._seat.number,
            pid=os.getpid(),
            uptime_s=self.uptime_s,
            in_flight=self._admission.in_flight,
            held=self._hold.held,
            draining=self._admission.draining,
        )

    def own_stories(self, name: str | None, newest: int) -> StoryPage:
        """The one of `name`, or the newest ones."""
        if name is None:
            stories = tuple(self._recent.newest(newest))
        else:
            story = self._recent.find(name)
            stories = () if story is None else (story,)
        return StoryPage(edge=self._edge, kept=self._recent.kept, stories=stories)

    def rest(self, resting: bool) -> None:
        """This worker alone."""
        self._admission.rest(resting)

    async def rest_all(self, orders: bytes, resting: bool) -> None:
        """All workers. One that is not reached is being started, and reads the kept orders."""
        self.rest(resting)
        await self._siblings.tell(OWN_ORDERS, orders)

    async def metrics(self) -> bytes:
        pages = [self.own_metrics(), *(await self._siblings.ask(METRICS)).values()]
        return merge(pages) + render(self._shared)

    async def workers(self) -> list[WorkerPage]:
        others = await self._siblings.ask(WORKER)
        pages = [self.own_worker(), *_read(others, WorkerPage)]
        return sorted(pages, key=lambda page: page.number)

    async def stories(self, name: str | None, newest: int) -> StoryPage:
        own = self.own_stories(name, newest)
        if name is not None and own.stories:
            return own
        question = f"?newest={newest}" if name is None else f"?id={name}"
        pages = _read(await self._siblings.ask(STORIES + question), StoryPage)
        stories: list[Story] = [*own.stories, *(one for page in pages for one in page.stories)]
        stories.sort(key=lambda story: -story.at)
        kept: Kept = self._recent.kept
        return StoryPage(edge=self._edge, kept=kept, stories=tuple(stories[:newest]))


def _read(bodies: dict[int, bytes], kind: type[_Page]) -> list[_Page]:
    """Pages of workers of another release that do not fit are left out."""
    pages: list[_Page] = []
    for body in bodies.values():
        try:
            pages.append(msgspec.json.decode(body, type=kind))
        except msgspec.MsgspecError:
            continue
    return pages
