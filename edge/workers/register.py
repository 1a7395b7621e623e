"""What a host lets others see of its Workers, and what it lets a new one ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from core.config_workers import Workers
from core.errors import WorkerRefused
from edge.workers.bundle import Bundle, Settings
from edge.workers.cron import read_cron
from edge.workers.routes import check_own_host, check_route, conflict
from edge.workers.table import Entry, digest_token, write_table
from edge.workers.unit import Unit

TOUCH_S = 5.0
Row = tuple[str, str, str, bool, Unit]
"""(name, tenant, token, open, what is served)."""


class Register:
    """Writes the table that the edge's processes read, and links that lead other Workers to the
    version which is served."""

    def __init__(self, root: Path, table: Path, limits: Workers) -> None:
        self._root = root
        self._table = table
        self._limits = limits

    def link(self, name: str) -> Path:
        """A socket's path that stays, whichever version is served."""
        return self._root / name

    def write(self, rows: Iterable[Row]) -> None:
        entries = []
        for name, tenant, token, open_, unit in rows:
            fresh = self._root / f"{name}.new"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(unit.socket.name)
            fresh.replace(self.link(name))
            entries.append(
                Entry(
                    name=name,
                    tenant=tenant,
                    version=unit.version,
                    socket=str(unit.socket),
                    used=str(unit.used),
                    touch_s=min(TOUCH_S, self._limits.idle_s / 4),
                    token=digest_token(token.encode()),
                    routes=unit.bundle.settings.routes,
                    by_name=unit.bundle.settings.workers_dev,
                    answer_s=self._limits.answer_s,
                    concurrency=self._limits.concurrency,
                    open=open_,
                    rest=unit.rest,
                )
            )
        write_table(self._table, entries)


@dataclass(frozen=True, slots=True)
class Served:
    """A Worker that others have to get along with."""

    tenant: str
    settings: Settings


def check_settings(
    settings: Settings,
    tenant: str,
    served: Mapping[str, Served],
    limits: Workers,
    languages: Collection[str],
) -> None:
    """What does not hang on the code. Raises WorkerRefused."""
    if settings.language not in languages:
        raise WorkerRefused(f"this edge runs no Workers in {settings.language}")
    for pattern in settings.routes:
        check_route(pattern, (*limits.zones, limits.domain))
    taken = {name: one.settings.routes for name, one in served.items()}
    if (why := conflict(settings.name, settings.routes, taken)) is not None:
        raise WorkerRefused(why, param="routes")
    for pattern in settings.routes:
        check_own_host(pattern, limits.domain, settings.name)
    for cron in settings.crons:
        read_cron(cron)
    for one in settings.services:
        target = served.get(one.service)
        if one.service != settings.name and (target is None or target.tenant != tenant):
            raise WorkerRefused(
                f"the service binding {one.binding!r} names the Worker {one.service!r}, which is"
                " not deployed; deploy it first",
                param="services",
            )


def check_secrets(bundle: Bundle, secrets: Iterable[str]) -> None:
    """Raises WorkerRefused where a script would see one of two things under one name."""
    settings = bundle.settings
    known = {name: "a variable" for name, _ in settings.vars} | bindings_of(bundle)
    for name in secrets:
        if name in known:
            raise WorkerRefused(
                f"{name!r} would name two things of the Worker {settings.name!r}: a secret and"
                f" {known[name]}; rename one, or take the secret away (`skerry worker secret delete"
                f" {name} --name {settings.name}`)",
                param=name,
            )


def bindings_of(bundle: Bundle) -> dict[str, str]:
    """What its names in `env` stand for, its variables left out."""
    settings = bundle.settings
    known = {one.binding: "a KV binding" for one in settings.kv}
    known |= {one.binding: "a service binding" for one in settings.services}
    if settings.ai is not None:
        known[settings.ai] = "the binding of AI"
    if bundle.assets is not None and bundle.assets.binding is not None:
        known[bundle.assets.binding] = "the binding of its assets"
    return known
