"""What the admin interface of Workers says and is told."""

from __future__ import annotations

import msgspec

from edge.workers.shelf import Deployment

BASE = "/admin/v1"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A Worker in a list."""

    name: str
    tenant: str
    version: str | None
    at: int
    routes: tuple[str, ...] = ()
    crons: tuple[str, ...] = ()
    language: str = "javascript"
    pid: int | None = None
    starts: int = 0
    open: bool = False
    rests_s: float = 0.0
    """For so long it is not started yet, since it `rests_for` something."""
    rests_for: str = ""


class EdgePage(msgspec.Struct, frozen=True, kw_only=True):
    """`domain`, `zones`: of the topology's `workers`."""

    edge: str
    url: str
    version: str
    domain: str
    languages: tuple[str, ...]


class Rows(msgspec.Struct, frozen=True):
    workers: list[Row]


class WorkerPage(msgspec.Struct, frozen=True, kw_only=True):
    worker: Row
    kept: tuple[str, ...]
    deployments: tuple[Deployment, ...]
    secrets: tuple[str, ...]
    """Names only."""


class Staged(msgspec.Struct, frozen=True):
    version: str


class StageKept(msgspec.Struct, frozen=True):
    """None: the version before the present one."""

    version: str | None = None


class Activate(msgspec.Struct, frozen=True):
    """`id`: of this deployment, made by whoever deploys; it can be taken back by it."""

    version: str
    how: str = "deploy"
    id: str = ""
