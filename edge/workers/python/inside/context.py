"""One call of a Worker, and what the whole process shares."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .outside import Outside


@dataclass(slots=True)
class Background:
    """What calls leave behind. `failed` is told of each that ends with an exception."""

    failed: Callable[[BaseException], None]
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def add(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(_waited(work))
        self.tasks.add(task)
        task.add_done_callback(self._done)

    async def settle(self) -> None:
        while self.tasks:
            await asyncio.wait(set(self.tasks))

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)


class Context:
    """`ctx` of a call."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self.props: dict[str, Any] = {}

    def waitUntil(self, work: Awaitable[Any]) -> None:
        self._background.add(work)

    wait_until = waitUntil

    def passThroughOnException(self) -> None:
        """Nothing lies behind a Worker here: its exception is the answer."""


@dataclass(frozen=True, slots=True)
class Call:
    outside: Outside
    context: Context


_call: contextvars.ContextVar[Call] = contextvars.ContextVar("call")


def enter(call: Call) -> None:
    """For this task and those it starts."""
    _call.set(call)


def current() -> Call:
    """Raises RuntimeError outside of a call, as Cloudflare's runtime does."""
    try:
        return _call.get()
    except LookupError:
        raise RuntimeError(
            "fetch and waitUntil work inside a handler, not at the top of a Worker"
        ) from None


async def _waited(work: Awaitable[Any]) -> Any:
    return await work
