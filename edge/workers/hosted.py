"""What a host knows of one Worker, and how it tells it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edge.workers.admin_pages import Row
from edge.workers.logs import LogBook
from edge.workers.rest import SAID
from edge.workers.shelf import Card
from edge.workers.unit import Unit


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host works. `root` is private, short and goes with the process; `edge` is where the
    edge accepts requests; `store` is the socket of the key-value store."""

    root: Path
    edge: str
    store: Path


@dataclass(slots=True)
class Hosted:
    """A Worker. `token` is what its processes say; `open`: it is being written, is not kept, and
    its callers are told what it throws."""

    name: str
    token: str
    book: LogBook
    card: Card
    open: bool = False
    active: Unit | None = None
    staged: dict[str, Unit] = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        return [*([self.active] if self.active else []), *self.staged.values()]

    def uses(self, name: str) -> bool:
        """Whether it is bound to the Worker `name`, which is another one."""
        if self.active is None or self.name == name:
            return False
        return any(one.service == name for one in self.active.bundle.settings.services)

    def row(self, now: float) -> Row:
        unit, card = self.active, self.card
        settings = None if unit is None else unit.bundle.settings
        rest = None if unit is None else unit.rest
        return Row(
            name=self.name,
            tenant=card.tenant,
            version=None if unit is None else unit.version,
            at=card.deployments[-1].at if card.deployments else 0,
            routes=settings.routes if settings else (),
            crons=settings.crons if settings else (),
            language=settings.language if settings else "javascript",
            pid=None if unit is None else unit.pid,
            starts=0 if unit is None else unit.starts,
            open=self.open,
            rests_s=0.0 if rest is None else rest.left_s(now),
            rests_for=""
            if rest is None
            else f"{SAID[rest.cause]}, its end number {rest.ends} in a row",
        )
