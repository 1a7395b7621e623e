"""The seam between a host and a language: how a bundle becomes a process.

A host makes the listening socket, starts the process, watches over it and ends it. The process

- accepts requests (HTTP/1.1) on the socket that it inherits as descriptor `Seat.listener`, which
  does not block: the host waits at it too, while no process is there. One that
  is about an exception of the Worker's own has a header `x-skerry-worker-threw: MARK` and a JSON
  body with `name` and `message`;
- listens on the Unix socket `Seat.control` and answers `GET /health` with 200 as long as its thread
  is free, and `POST /scheduled` (`{"cron", "time"}`, milliseconds) with `{"outcome": "ok"}` once
  the handler is done;
- asks the edge at `Seat.edge` and the store at `Seat.store` with the header `x-skerry-worker:
  TOKEN`, which the Worker's code never sees;
- writes JSON lines with `level` and `message`: `message` is what the Worker said, or the mark, a
  blank and a `Run` as JSON. What is no such line is shown as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from core.config_workers import Workers
from edge.workers.bundle import Bundle, Language

TOKEN_HEADER = "x-skerry-worker"
NAMESPACE_HEADER = "x-skerry-namespace"
THREW_HEADER = "x-skerry-worker-threw"
CF_HEADER = "x-skerry-cf"
"""JSON of what a Worker sees as `request.cf`."""
SCHEME_HEADER = "x-skerry-scheme"
"""That of `request.url`: http or https; http when absent."""
AI_CACHE = "@ai"
"""The namespace in which the AI binding keeps answers; no binding of a Worker can be called so."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What one process is given. `folder` is its own and goes with it; `services` are the sockets
    of the other Workers that it is bound to."""

    name: str
    folder: Path
    listener: int
    control: Path
    edge: str
    store: Path
    token: str
    mark: str
    limits: Workers
    secrets: Mapping[str, str] = field(default_factory=dict)
    services: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, without a shell; `environment` is all that it gets of one. `wrapped`: the Worker
    is the innermost process below it. `descriptors` stay open in it, besides the listener's.
    `empty_mb`: what its processes take without any code of a Worker, a little more than less."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapped: bool = False
    descriptors: tuple[int, ...] = ()
    empty_mb: float = 48.0


class Thrown(msgspec.Struct, frozen=True):
    name: str = "Error"
    message: str = ""
    stack: str = ""


class Run(msgspec.Struct, frozen=True):
    """One request or one timer that a Worker was run for."""

    outcome: str = "ok"
    method: str | None = None
    url: str | None = None
    status: int | None = None
    cron: str | None = None
    exceptions: tuple[Thrown, ...] = ()


class Runtime(Protocol):
    @property
    def language(self) -> Language: ...

    async def prepare(self, seat: Seat, bundle: Bundle) -> Launch:
        """Write into `seat.folder` what the process reads. Raises WorkerRefused for what this
        runtime cannot serve, ConfigError where this machine cannot run it."""
        ...

    async def release(self, seat: Seat) -> None:
        """The process that `prepare` was for has ended, or never came to be. Idempotent."""
        ...
