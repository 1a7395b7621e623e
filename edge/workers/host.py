"""The Workers of one edge: staged, served, kept, ended. Its steps come one after the other.

A deploy has two steps here, so that several edges change together or none does: `stage` checks and
starts a version beside the one that is served, `activate` puts it into the table.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from core.config_tenants import ANONYMOUS
from core.config_workers import Workers
from core.errors import InvalidRequest, NotFound, SkerryError, WorkerRefused
from edge.workers.admin_pages import Row
from edge.workers.bundle import Bundle, digest_of, unpack, version_of
from edge.workers.cron import Cron, read_cron
from edge.workers.hosted import Hosted, Place
from edge.workers.kv_store import Space
from edge.workers.logs import LogBook
from edge.workers.pacer import Pacer
from edge.workers.register import Register, Served, check_secrets, check_settings
from edge.workers.runtime import AI_CACHE, Runtime, Seat
from edge.workers.shelf import Card, Deployment, Shelf
from edge.workers.unit import Unit

TAKEOVER = "takeover"
"""How a deployment came about that gave a Worker of nobody named to a tenant."""
_log = logging.getLogger("skerry.workers")


class Host:
    def __init__(
        self,
        *,
        place: Place,
        register: Register,
        limits: Workers,
        shelf: Shelf,
        runtimes: Mapping[str, Runtime],
        pacer: Pacer,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._place = place
        self._register = register
        self._limits = limits
        self._shelf = shelf
        self._runtimes = runtimes
        self._pacer = pacer
        self._clock = clock
        self._hosted: dict[str, Hosted] = {}
        self._serial = 0
        self._turn = asyncio.Lock()
        self._ending: dict[asyncio.Task[None], Unit] = {}

    async def open(self) -> None:
        """Serve again what was served before. What does not start any more is told and left."""
        async with self._turn:
            for name in self._shelf.names():
                try:
                    card = self._shelf.card(name)
                    if card is None or card.active is None:
                        continue
                    hosted = self._made(name, card)
                    bundle = unpack(self._shelf.take(name, card.active))
                    await self._start(hosted, bundle, card.active, card.tenant)
                    hosted.active = hosted.staged.pop(card.active)
                except SkerryError as error:
                    _log.error("worker not served name=%s why=%s", name, error)
            self._write()

    async def close(self) -> None:
        """End all processes, at once. The table stays: whoever comes next serves the same."""
        units = [unit for hosted in self._hosted.values() for unit in hosted.units]
        units += self._ending.values()
        self._hosted.clear()
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*(unit.close(1.0) for unit in units), *self._ending,
                             return_exceptions=True)  # fmt: skip

    async def stage(self, name: str, data: bytes, *, tenant: str, open_: bool = False) -> str:
        """Check a bundle and start it beside what is served. Returns its version. A Worker of
        nobody named becomes the tenant's with its activation. Raises WorkerRefused, ConfigError."""
        async with self._turn:
            bundle = unpack(data)
            if bundle.settings.name != name:
                raise WorkerRefused(f"the bundle is of {bundle.settings.name!r}, not of {name!r}")
            version = version_of(digest_of(data))
            self._check(bundle, tenant)
            hosted = self._of(name, tenant, open_)
            check_secrets(bundle, hosted.card.secrets)
            await self._start(hosted, bundle, version, tenant)
            if not open_:
                self._shelf.put(name, data)
            return version

    async def stage_kept(self, name: str, version: str | None) -> str:
        """The same for a version that is kept, by default the one served before. Raises NotFound,
        WorkerRefused."""
        async with self._turn:
            return await self._stage_kept(name, version, clear=True)

    async def activate(self, name: str, version: str, how: str, id_: str = "") -> None:
        """Serve what was staged. What was served ends after its last answer. `id_` is of this
        deployment alone, for whoever may want it back. Raises NotFound."""
        async with self._turn:
            self._activate(name, version, how, id_)

    async def discard(self, name: str, version: str) -> None:
        """Forget what was staged. Idempotent."""
        async with self._turn:
            hosted = self._hosted.get(name)
            if hosted is not None and (unit := hosted.staged.pop(version, None)) is not None:
                await unit.close(0.0)
            if hosted is not None and hosted.active is None and not hosted.staged:
                self._drop(hosted, keep=bool(hosted.card.deployments))

    async def withdraw(self, name: str, version: str, id_: str = "") -> None:
        """Take an activation of `version` back, the one of that id: what was served before is
        served again, or nothing. For a deploy that another edge could not follow. Raises NotFound,
        also where that very activation is not the last one: then it never came here."""
        async with self._turn:
            hosted = self._known(name)
            deployments = hosted.card.deployments
            if not deployments or (deployments[-1].version, deployments[-1].id) != (version, id_):
                raise NotFound(f"{name!r} is not served in the version {version!r} by this deploy")
            if len(deployments) == 1:
                self._delete(name)
                return
            taken = deployments[-1].how == TAKEOVER
            before = hosted.card
            if taken:
                hosted.card = msgspec.structs.replace(before, tenant=ANONYMOUS)
            try:
                # what it was bound to may have been taken over too, and it was served with that
                kept = await self._stage_kept(name, deployments[-2].version, bound=not taken)
            except BaseException:
                hosted.card = before
                raise
            self._activate(name, kept, "withdraw")

    async def delete(self, name: str) -> None:
        """With its versions and secrets; what it kept in namespaces stays. Raises NotFound."""
        async with self._turn:
            self._delete(name)

    async def set_secret(self, name: str, key: str, value: str | None) -> None:
        """Give a Worker a secret, or take it away (None); it is started again with it. Raises
        NotFound, WorkerRefused."""
        async with self._turn:
            hosted = self._known(name)
            kept = {k: v for k, v in hosted.card.secrets.items() if k != key}
            if value is None and len(kept) == len(hosted.card.secrets):
                raise NotFound(f"the Worker {name!r} has no secret {key!r}")
            if value is not None and hosted.active is not None:
                check_secrets(hosted.active.bundle, [key])
            before = hosted.card
            hosted.card = msgspec.structs.replace(
                hosted.card, secrets=kept if value is None else {**kept, key: value}
            )
            try:
                if hosted.card.active is not None:
                    await self._stage_kept(name, hosted.card.active)
                    self._activate(name, hosted.card.active, "secret")
            except BaseException:
                hosted.card = before
                raise

    def rows(self) -> list[Row]:
        return [self.row(name) for name in sorted(self._hosted)]

    def row(self, name: str) -> Row:
        """Raises NotFound."""
        return self._known(name).row(self._clock())

    def card(self, name: str) -> tuple[Card, list[str]]:
        """And the versions that are kept. Raises NotFound."""
        return self._known(name).card, self._shelf.versions(name)

    def book(self, name: str) -> LogBook:
        """Raises NotFound."""
        return self._known(name).book

    def crons(self) -> list[tuple[Unit, Cron, LogBook]]:
        """All timers of what is served."""
        return [
            (one.active, read_cron(text), one.book)
            for one in self._hosted.values()
            if one.active is not None and not one.open
            for text in one.active.bundle.settings.crons
        ]

    def space_of(self, token: str, binding: str) -> Space | None:
        """See `kv_http.Spaces`."""
        for hosted in self._hosted.values():
            if secrets.compare_digest(hosted.token, token):
                tenant = hosted.card.tenant
                if binding == AI_CACHE:
                    return Space(tenant, AI_CACHE)
                for unit in hosted.units:
                    for kv in unit.bundle.settings.kv:
                        if kv.binding == binding:
                            return Space(tenant, kv.id)
        return None

    async def _stage_kept(
        self, name: str, version: str | None, *, bound: bool = True, clear: bool = False
    ) -> str:
        hosted = self._known(name)
        version = version or hosted.card.before
        if version is None:
            raise NotFound(f"the Worker {name!r} has no version before the present one")
        kept = self._shelf.versions(name)
        found = [one for one in kept if one.startswith(version)]
        if len(found) != 1:
            many = "several versions" if found else "no version"
            raise NotFound(
                f"the Worker {name!r} has {many} {version!r}; kept are: {', '.join(kept)}"
            )
        bundle = unpack(self._shelf.take(name, found[0]))
        self._check(bundle, hosted.card.tenant, bound=bound)
        if clear:  # what is served already is started again as it is
            check_secrets(bundle, hosted.card.secrets)
        await self._start(hosted, bundle, found[0], hosted.card.tenant)
        return found[0]

    def _activate(self, name: str, version: str, how: str, id_: str = "") -> None:
        hosted = self._known(name)
        unit = hosted.staged.get(version)
        if unit is None:
            raise NotFound(f"the version {version!r} of {name!r} is not staged on this edge")
        tenant = unit.tenant
        _refuse_foreign(hosted, tenant)  # another one may have taken it over meanwhile
        before, hosted.active = hosted.active, hosted.staged.pop(version)
        if hosted.card.tenant != tenant and hosted.card.deployments:
            how = TAKEOVER
        deployment = Deployment(version, int(self._clock()), how, id_)
        hosted.card = msgspec.structs.replace(
            hosted.card, tenant=tenant, deployments=(*hosted.card.deployments, deployment)
        )
        if not hosted.open:
            self._shelf.write(name, hosted.card)
        self._write()
        hosted.book.say(version, "host", f"is served now ({how})")
        if before is not None:
            self._end(before)

    def _delete(self, name: str) -> None:
        hosted = self._known(name)
        users = [one.name for one in self._hosted.values() if one.uses(name)]
        if users:
            raise WorkerRefused(f"the Worker {name!r} is bound to by {', '.join(users)}")
        self._drop(hosted)
        self._write()
        for unit in hosted.units:
            self._end(unit)

    def _of(self, name: str, tenant: str, open_: bool) -> Hosted:
        hosted = self._hosted.get(name)
        if hosted is None:
            card = self._shelf.card(name) or Card(tenant=tenant)
            hosted = self._made(name, card)
            hosted.open = open_
        _refuse_foreign(hosted, tenant)
        if hosted.open != open_:
            raise InvalidRequest(
                f"the Worker {name!r} is " + ("in dev" if hosted.open else "served")
            )
        return hosted

    def _made(self, name: str, card: Card) -> Hosted:
        hosted = Hosted(name, secrets.token_urlsafe(32), LogBook(clock=self._clock), card)
        self._hosted[name] = hosted
        return hosted

    def _known(self, name: str) -> Hosted:
        hosted = self._hosted.get(name)
        if hosted is None:
            known = ", ".join(sorted(self._hosted)) or "none"
            raise NotFound(f"no Worker is named {name!r} on this edge; there are: {known}")
        return hosted

    async def _start(self, hosted: Hosted, bundle: Bundle, version: str, tenant: str) -> None:
        """Raises WorkerRefused, ConfigError."""
        old = hosted.staged.pop(version, None)
        if old is not None:
            await old.close(0.0)
        unit = self._unit(hosted, bundle, version, tenant)
        try:
            await unit.start()
        except BaseException as error:
            await unit.close(0.0)
            if hosted.active is None and not hosted.staged and not hosted.card.deployments:
                self._drop(hosted, keep=True)
            if isinstance(error, WorkerRefused):
                raise WorkerRefused(
                    f"the Worker {hosted.name!r} does not start: {error}"
                ) from error
            raise
        hosted.staged[version] = unit

    def _unit(self, hosted: Hosted, bundle: Bundle, version: str, tenant: str) -> Unit:
        self._serial += 1

        def seat(folder: Path, listener: int, control: Path) -> Seat:
            return Seat(
                name=hosted.name,
                folder=folder,
                listener=listener,
                control=control,
                edge=self._place.edge,
                store=self._place.store,
                token=hosted.token,
                mark=secrets.token_hex(8),
                limits=self._limits,
                secrets=hosted.card.secrets,
                services={
                    one.binding: self._register.link(one.service)
                    for one in bundle.settings.services
                },
            )

        return Unit(
            version=version,
            tenant=tenant,
            bundle=bundle,
            runtime=self._runtimes[bundle.settings.language],
            book=hosted.book,
            limits=self._limits,
            root=self._place.root,
            serial=self._serial,
            seat=seat,
            pacer=self._pacer,
            changed=self._tell,
        )

    def _write(self) -> None:
        self._register.write(
            (one.name, one.card.tenant, one.token, one.open, one.active)
            for one in self._hosted.values()
            if one.active is not None
        )

    def _tell(self) -> None:
        """That a Worker rests, or does no more. Where it cannot be told, whoever comes is turned
        away at the Worker's own socket."""
        try:
            self._write()
        except OSError as error:
            _log.error("table of Workers unwritten why=%s", error)

    def _check(self, bundle: Bundle, tenant: str, *, bound: bool = True) -> None:
        served = {
            name: Served(one.card.tenant, one.active.bundle.settings)
            for name, one in self._hosted.items()
            if one.active is not None
        }
        settings = bundle.settings
        if not bound:
            settings = msgspec.structs.replace(settings, services=())
        check_settings(settings, tenant, served, self._limits, self._runtimes)

    def _drop(self, hosted: Hosted, *, keep: bool = False) -> None:
        self._hosted.pop(hosted.name, None)
        if not keep and not hosted.open:
            self._shelf.forget(hosted.name)

    def _end(self, unit: Unit) -> None:
        """After its last answer, while others go on."""
        task = asyncio.create_task(unit.close())
        self._ending[task] = unit
        task.add_done_callback(lambda done: self._ending.pop(done, None))


def _refuse_foreign(hosted: Hosted, tenant: str) -> None:
    """What acts for nobody named may be anybody's; but not while somebody writes it. Raises
    WorkerRefused."""
    owner = hosted.card.tenant
    if owner != tenant and (owner != ANONYMOUS or hosted.open):
        raise WorkerRefused(
            f"the Worker {hosted.name!r} belongs to the tenant {owner!r}; choose another name"
        )
