"""The versions of an edge's Workers on disk: `FOLDER/NAME/`, with a file for each version.

What was written is read again after a restart; a file is replaced as a whole.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import msgspec

from core.errors import InternalError, NotFound
from edge.workers.bundle import digest_of, version_of

KEPT = 20
"""Versions of a Worker; older ones go, unless they are served."""


class Deployment(msgspec.Struct, frozen=True):
    """`at` in Unix seconds; `how`: deploy or rollback. `id` tells it from another deployment of the
    same version."""

    version: str
    at: int
    how: str = "deploy"
    id: str = ""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a Worker. The last deployment is the one that is served."""

    tenant: str
    deployments: tuple[Deployment, ...] = ()
    secrets: dict[str, str] = {}

    @property
    def active(self) -> str | None:
        return self.deployments[-1].version if self.deployments else None

    @property
    def before(self) -> str | None:
        """The version that was served before the present one."""
        earlier = (one.version for one in reversed(self.deployments))
        return next((one for one in earlier if one != self.active), None)


class Shelf:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def names(self) -> list[str]:
        return sorted(path.parent.name for path in self._folder.glob("*/card.json"))

    def card(self, name: str) -> Card | None:
        """Raises InternalError for one that is damaged."""
        path = self._folder / name / "card.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Card)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise InternalError(f"{path} is damaged: {error}") from error

    def write(self, name: str, card: Card) -> None:
        _replace(self._folder / name / "card.json", msgspec.json.encode(card))
        known = [one.version for one in card.deployments]
        kept = {*list(dict.fromkeys(reversed(known)))[:KEPT], card.active}
        for path in self._folder.glob(f"{name}/*.bundle"):
            if path.stem in known and path.stem not in kept:
                path.unlink()

    def put(self, name: str, data: bytes) -> str:
        """Keep a bundle. Returns its version."""
        version = version_of(digest_of(data))
        _replace(self._file(name, version), data)
        return version

    def take(self, name: str, version: str) -> bytes:
        """Raises NotFound; InternalError where the file is not what was put there."""
        try:
            data = self._file(name, version).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"the Worker {name!r} has no version {version!r}") from None
        if version_of(digest_of(data)) != version:
            raise InternalError(f"{self._file(name, version)} is damaged: its digest is another")
        return data

    def versions(self, name: str) -> list[str]:
        return sorted(path.stem for path in self._folder.glob(f"{name}/*.bundle"))

    def forget(self, name: str) -> None:
        shutil.rmtree(self._folder / name, ignore_errors=True)

    def _file(self, name: str, version: str) -> Path:
        return self._folder / name / f"{version}.bundle"


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    fresh.touch(mode=0o600)
    fresh.write_bytes(data)
    fresh.replace(path)
