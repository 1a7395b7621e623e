"""All edges of a world at once, through their admin interfaces: every change is made by all or by
none.

First each edge is asked whether it is there, then each checks and starts the new version beside the
one that is served, and only when all have done so do they change over, one after the other within
milliseconds. When one fails on the way, those that changed before go back, and those that cannot be
taken back are named.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
import msgspec

from core.address import split_address
from core.config import Edge, World
from core.errors import ConfigError, SkerryError
from core.nearest import did_you_mean
from edge.workers.admin_pages import BASE, Activate, EdgePage, Rows, Staged, StageKept, WorkerPage
from edge.workers.bundle import digest_of

TIMEOUT = httpx.Timeout(60.0, connect=3.0)


class _Problem(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem = msgspec.field(default_factory=_Problem)


class FleetError(SkerryError):
    """An edge is down or refused; the message names it, and what has changed if anything has."""


class NoAnswer(FleetError):
    """The edge may have done what it was asked: its answer never came."""


@dataclass(frozen=True, slots=True)
class Admin:
    """One edge's admin interface."""

    edge: str
    base: str
    client: httpx.Client

    def ask(
        self, method: str, path: str, body: bytes = b"", params: dict[str, str] | None = None
    ) -> bytes:
        """Raises FleetError, NoAnswer."""
        try:
            answer = self.client.request(
                method, f"{self.base}{BASE}{path}", content=body, params=params
            )
        except httpx.HTTPError as error:
            raise NoAnswer(
                f"the edge {self.edge!r} does not answer at {self.base}"
                f" ({str(error) or type(error).__name__})"
            ) from error
        if answer.is_success:
            return answer.content
        with suppress(msgspec.MsgspecError):
            told = msgspec.json.decode(answer.content, type=_Refusal).error.message
            raise FleetError(f"the edge {self.edge!r} refused: {told}")
        raise FleetError(f"the edge {self.edge!r} refused with {answer.status_code}")


class Fleet:
    def __init__(self, admins: Sequence[Admin]) -> None:
        self.admins = admins

    def edges(self) -> list[EdgePage]:
        """All of them. Raises FleetError, naming those that are down."""
        pages: list[EdgePage] = []
        down: list[str] = []
        for admin in self.admins:
            try:
                pages.append(msgspec.json.decode(admin.ask("GET", "/edge"), type=EdgePage))
            except FleetError as error:
                down.append(str(error))
        if down:
            raise FleetError(
                f"{'; '.join(down)}. Nothing was changed: start it again, or take it out of the"
                " topology"
            )
        return pages

    def deploy(self, name: str, data: bytes, *, tenant: str, open_: bool = False) -> str:
        """Serve a bundle everywhere. Returns its version. Raises FleetError."""
        self.edges()
        params = {"tenant": tenant, **({"open": "1"} if open_ else {})}
        path = f"/workers/{name}/staged/{digest_of(data)}"
        return self._everywhere(
            name, lambda admin: admin.ask("PUT", path, data, params), how="deploy"
        )

    def rollback(self, name: str, version: str | None) -> str:
        """Serve a version that is kept, by default the one before. Raises FleetError."""
        self.edges()
        body = msgspec.json.encode(StageKept(version))
        return self._everywhere(
            name, lambda admin: admin.ask("POST", f"/workers/{name}/staged", body), how="rollback"
        )

    def worker(self, name: str) -> list[tuple[str, WorkerPage]]:
        """What each edge knows of it."""
        return [
            (one.edge, msgspec.json.decode(one.ask("GET", f"/workers/{name}"), type=WorkerPage))
            for one in self.admins
        ]

    def rows(self) -> list[tuple[str, Rows]]:
        return [
            (one.edge, msgspec.json.decode(one.ask("GET", "/workers"), type=Rows))
            for one in self.admins
        ]

    def homes(self, name: str) -> list[Admin]:
        """The edges that have it. Raises FleetError, with the nearest name where none has."""
        self.edges()
        pages = self.rows()
        have = {edge: {row.name for row in page.workers} for edge, page in pages}
        found = [admin for admin in self.admins if name in have[admin.edge]]
        if not found:
            known = sorted(set().union(*have.values()))
            hint = did_you_mean(name, known, f"there are: {', '.join(known) or 'none'}")
            raise FleetError(f"no Worker is named {name!r}; {hint}")
        return found

    def delete(self, name: str) -> None:
        for admin in self.homes(name):
            admin.ask("DELETE", f"/workers/{name}")

    def secret(self, name: str, key: str, value: str | None) -> None:
        self.edges()
        for admin in self.admins:
            path = f"/workers/{name}/secrets/{key}"
            if value is None:
                admin.ask("DELETE", path)
            else:
                admin.ask("PUT", path, value.encode())

    def _everywhere(self, name: str, stage: Callable[[Admin], bytes], *, how: str) -> str:
        staged: list[tuple[Admin, str]] = []
        id_ = secrets.token_hex(8)
        begun = 0  # so many were asked to change over; the last of them may not have done so
        try:
            for admin in self.admins:
                answer = msgspec.json.decode(stage(admin), type=Staged)
                staged.append((admin, answer.version))
            versions = {version for _, version in staged}
            if len(versions) != 1:
                told = ", ".join(f"{admin.edge}: {version}" for admin, version in staged)
                raise FleetError(f"the edges differ in the version before ({told}); name one")
            for admin, version in staged:
                body = msgspec.json.encode(Activate(version, how, id_))
                begun += 1
                admin.ask("POST", f"/workers/{name}/active", body)
        except BaseException as error:
            left = _back(name, staged, begun, id_)
            if isinstance(error, FleetError):
                raise FleetError(f"{str(error).rstrip('.')}. {_outcome(left)}") from error
            raise
        return staged[0][1]


def _back(name: str, staged: Sequence[tuple[Admin, str]], begun: int, id_: str) -> list[str]:
    """Undo what was done. Returns the edges that may serve the new version all the same."""
    left: list[str] = []
    for at, (admin, version) in enumerate(staged):
        if at < begun:
            try:
                path = f"/workers/{name}/active/{version}"
                admin.ask("DELETE", path, params={"id": id_})
                continue
            except NoAnswer:
                left.append(admin.edge)
                continue
            except FleetError:
                if at < begun - 1:  # it said that it changed over, and will not go back
                    left.append(admin.edge)
                    continue
        with suppress(FleetError):  # a version that is only staged serves nobody
            admin.ask("DELETE", f"/workers/{name}/staged/{version}")
    return left


def _outcome(left: Sequence[str]) -> str:
    if not left:
        return "Nothing was changed"
    return (
        f"These edges could not be taken back and may serve the new version: {', '.join(left)}."
        " Say `skerry worker versions` to see, then deploy or roll back once they answer"
    )


@contextmanager
def fleet_of(world: World) -> Iterator[Fleet]:
    """Every edge of the world. Raises ConfigError where one takes no Workers."""
    admins = []
    for edge in world.topology.edges:
        if edge.admin is None:
            raise ConfigError(
                f"{world.path}: the edge {edge.name!r} has no admin address; give it one, like"
                ' admin = "127.0.0.1:8790"'
            )
        if split_address(edge.admin)[1] == 0:
            raise ConfigError(
                f"the world {world.topology.name!r} does not run here: start it with `skerry up`,"
                " or say with --state which one you mean; edges that are started one by one need"
                " an admin address with a fixed port"
            )
        admins.append((edge.name, f"http://{edge.admin}"))
    with _client(world) as client:
        yield Fleet([Admin(name, base, client) for name, base in admins])


@contextmanager
def admin_of(world: World, edge: Edge) -> Iterator[Admin]:
    """Of one edge that runs and has an admin address."""
    with _client(world) as client:
        yield Admin(edge.name, f"http://{edge.admin}", client)


def _client(world: World) -> httpx.Client:
    headers = {"authorization": f"Bearer {world.secret('admin').decode()}"}
    return httpx.Client(trust_env=False, timeout=TIMEOUT, headers=headers)
