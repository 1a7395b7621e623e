"""Mutual TLS between the processes of a world: every one has a certificate of the world's own
authority and shows it to whom it speaks with. Certificates that change on disk are taken up by the
connections that are made from then on; those that stand go on.

`skerry certs init` makes the files (`deploy.certs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from core.config import World
from core.errors import ConfigError
from core.private_files import warn_if_shared

EVERY_S = 5.0
"""Between two looks at the files."""


@dataclass(frozen=True, slots=True)
class Files:
    """`authority` may hold several certificates: while one follows another both are good."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path, name: str) -> Files:
        """Those of the process `name`."""
        return cls(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")


class Credentials:
    """A process's own certificate, and contexts that show it and ask for the other side's.

    A client's context wants the other side's certificate to name the address that was dialled.
    """

    def __init__(self, files: Files) -> None:
        """Raises ConfigError, which says how to make them."""
        self._files = files
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.verify_mode = ssl.CERT_REQUIRED
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        warn_if_shared(files.key)
        self._seen = self._stamp()
        self._load()

    def refresh(self) -> bool:
        """Take up files that have changed; whether they had. Files that do not fit, as in the
        middle of being written, are looked at again the next time."""
        now = self._stamp()
        if now == self._seen:
            return False
        try:
            self._load()
        except ConfigError:
            return False
        self._seen = now
        return True

    async def keep_fresh(self, every_s: float = EVERY_S) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key, certificate, for who takes no context (gRPC)."""
        files = self._files
        return (
            files.authority.read_bytes(),
            files.key.read_bytes(),
            files.certificate.read_bytes(),
        )

    def _load(self) -> None:
        files = self._files
        # A context keeps the half of a pair that it could read, and would serve nobody any more.
        tried = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            for context in (tried, self.server, self.client):
                context.load_cert_chain(files.certificate, files.key)
                context.load_verify_locations(files.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{files.certificate} does not serve with {files.key.name} and "
                f"{files.authority.name}: {error}; `skerry certs init` makes them"
            ) from error

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        try:
            files = (self._files.authority, self._files.certificate, self._files.key)
            return tuple((path.stat().st_mtime_ns, path.stat().st_size) for path in files)
        except OSError:
            return ()


def credentials_of(world: World, name: str) -> Credentials | None:
    """Of the process `name`; None where the world's processes speak plaintext. Raises
    ConfigError."""
    tls = world.topology.tls
    return Credentials(Files.of(world.state / tls.folder, name)) if tls.inside else None


@contextlib.asynccontextmanager
async def kept_fresh(credentials: Credentials | None) -> AsyncIterator[None]:
    """Looks at its files until the block ends."""
    if credentials is None:
        yield
        return
    task = asyncio.create_task(credentials.keep_fresh())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
