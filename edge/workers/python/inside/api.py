"""The module `workers`, as a Python Worker imports it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .body import Blob, Body, File, FormData
from .context import Context, current
from .headers import Headers
from .messages import FetchResponse, Request, Response
from .values import plain, wrap

__all__ = [
    "Blob",
    "Body",
    "Context",
    "FetchResponse",
    "File",
    "FormData",
    "Headers",
    "Request",
    "Response",
    "WorkerEntrypoint",
    "env",
    "fetch",
    "handler",
    "import_from_javascript",
    "python_from_rpc",
    "python_to_rpc",
    "waitUntil",
    "wait_until",
]

_F = TypeVar("_F", bound=Callable[..., Any])

UNSUPPORTED = {
    "DurableObject": "Durable Objects",
    "WorkflowEntrypoint": "Workflows",
}
"""Names of the real module that cannot be had here, and what they are."""


class Env:
    """Bindings, variables and secrets by name."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.__dict__.update(found)

    def __getitem__(self, name: str) -> Any:
        return self.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(self.__dict__)) or "nothing"
        raise AttributeError(f"env has no {name!r}; wrangler's configuration gives: {known}")


env = Env({})
"""Filled before the Worker is imported."""


class WorkerEntrypoint:
    """What a Worker's `class Default` is made from; an object for each call."""

    def __init__(self, ctx: Context, env: Env) -> None:
        self.ctx, self.env = ctx, env


def handler(function: _F) -> _F:
    """Marks `on_fetch` and its like in the older style."""
    return function


async def fetch(input: str | Request, init: Any = None, **named: Any) -> FetchResponse:
    return await current().outside.fetch(input, init, **named)


def wait_until(work: Awaitable[Any]) -> None:
    """The process lives on until `work` is done."""
    current().context.waitUntil(work)


waitUntil = wait_until


def python_from_rpc(value: Any) -> Any:
    return plain(value)


def python_to_rpc(value: Any) -> Any:
    return wrap(value)


def import_from_javascript(name: str) -> Any:
    raise ImportError(f"modules of JavaScript cannot be imported here: {name}")


def __getattr__(name: str) -> Any:
    if name in UNSUPPORTED:
        raise ImportError(f"{UNSUPPORTED[name]} are not supported here (workers.{name})")
    raise AttributeError(f"module 'workers' has no attribute {name!r}")
