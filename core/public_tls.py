"""The certificate that an edge shows its callers, by the paths of `[edges.tls]`.

The files are looked at every few seconds. A pair that serves is taken up by the connections that
are made from then on; one that does not is said in the log, and the one before it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.config import World
from core.errors import ConfigError
from core.pins import OVERLAP_S, EdgeFiles, believing, certificates_in, files_of
from core.private_files import warn_if_shared

_log = logging.getLogger("skerry.tls")

EVERY_S = 2.0
"""Between two looks at the files."""
KEPT = 3
"""Certificates that are left for `Pins` at most, however often they are renewed."""
SOON_S = 14 * 86400
"""What renews certificates has usually done so long before."""

Standing = Literal["good", "ends soon", "ended"]
_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Pair:
    context: ssl.SSLContext
    leaf: str
    ends: float
    """Unix seconds."""
    names: tuple[str, ...]


class PublicCertificate:
    """`clock`: Unix seconds."""

    def __init__(self, files: EdgeFiles, *, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError, which names the file and what to do."""
        self._files = files
        self._clock = clock
        self._stamp = _stamp(files)
        self._complaint = ""
        self._standing: Standing = "good"
        warn_if_shared(files.key)
        self._pair = _load(files)
        self._leave(self._pair.leaf)
        self._since = clock()
        self._alone = False
        _log.info(
            "https certificate=%s names=%s days_left=%.0f",
            files.certificate, ",".join(self._pair.names), self.left_s / 86400,
        )  # fmt: skip
        self._say_standing()

    def current(self) -> ssl.SSLContext:
        """For the next connection."""
        return self._pair.context

    @property
    def left_s(self) -> float:
        """Seconds until it ends; below 0 afterwards."""
        return self._pair.ends - self._clock()

    def refresh(self) -> bool:
        """Whether another pair was taken up. One that does not serve is looked at again each time,
        and spoken of once for each reason."""
        self._say_standing()
        self._forget()
        before = _stamp(self._files)
        if before == self._stamp and not self._complaint:
            return False
        try:
            pair = _load(self._files)
            if _stamp(self._files) != before:
                return False  # written meanwhile: the next look finds it whole
            new = pair.leaf != self._pair.leaf
            if new:
                self._leave(pair.leaf)
        except ConfigError as error:
            if str(error) != self._complaint:
                _log.error("certificate not taken up, the one before it goes on: %s", error)
            self._complaint = str(error)
            return False
        was, self._complaint = self._complaint, ""
        self._stamp, self._pair = before, pair
        if new:
            self._since, self._alone = self._clock(), False
            _log.info("https certificate taken up days_left=%.0f", self.left_s / 86400)
        elif was:
            _log.info("the files serve again, with the https certificate that is shown")
        self._say_standing()
        return new

    async def keep_fresh(self, every_s: float = EVERY_S) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def _leave(self, leaf: str) -> None:
        """Before it is shown; with what other processes of the edge may show for a while yet.
        Raises ConfigError."""
        path = self._files.shown
        try:
            before = certificates_in(path.read_bytes()) if path.exists() else []
            if before[:1] == [leaf]:
                return
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._write([leaf, *(one for one in before if one != leaf)][:KEPT])
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def _forget(self) -> None:
        """What was shown before is left no longer, once every process of the edge has looked. If a
        newer one than ours is there, that is for whoever left it."""
        if self._alone or self._clock() - self._since < OVERLAP_S:
            return
        with contextlib.suppress(OSError):  # the next look finds it again
            left = certificates_in(self._files.shown.read_bytes())
            if left[:1] == [self._pair.leaf]:
                self._write(left[:1])
                self._alone = True

    def _write(self, kept: Sequence[str]) -> None:
        path = self._files.shown
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text("".join(f"{one}\n" for one in kept), encoding="ascii")
        os.replace(fresh, path)

    def _say_standing(self) -> None:
        left_s = self.left_s
        now: Standing = "ended" if left_s <= 0 else "ends soon" if left_s < SOON_S else "good"
        if now == self._standing:
            return
        self._standing = now
        if now != "good":
            level = logging.ERROR if now == "ended" else logging.WARNING
            _log.log(
                level, "https certificate %s file=%s days_left=%.1f: renew it, the files are "
                "looked at every few seconds", now, self._files.certificate, left_s / 86400,
            )  # fmt: skip


def public_of(world: World, name: str) -> PublicCertificate | None:
    """Of the edge `name`; None where it speaks plaintext. Raises ConfigError."""
    files = files_of(world, world.topology.edge(name))
    return None if files is None else PublicCertificate(files)


@contextlib.asynccontextmanager
async def kept_public(public: PublicCertificate | None) -> AsyncIterator[None]:
    """Looks at its files until the block ends."""
    if public is None:
        yield
        return
    task = asyncio.create_task(public.keep_fresh())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def _load(files: EdgeFiles) -> _Pair:
    """Raises ConfigError unless callers can be served with them."""
    certificate, key = _read(files.certificate, "certificate"), _read(files.key, "key")
    leaf = next(iter(certificates_in(certificate)), None)
    if leaf is None:
        raise ConfigError(f"{files.certificate} (edges.tls.certificate) has no certificate in PEM")
    if b"ENCRYPTED" in key:
        raise ConfigError(
            f"{files.key} (edges.tls.key) wants a passphrase, and an edge starts without being "
            "asked: write it without one, readable by the edge's user alone"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.certificate, files.key)
        shown = _shown_by(context, leaf)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{files.certificate} and {files.key.name} {_why(error)}") from error
    names = tuple(value for _, value in shown.get("subjectAltName", ()))
    return _Pair(context, leaf, ssl.cert_time_to_seconds(shown["notAfter"]), names)


def _shown_by(context: ssl.SSLContext, leaf: str) -> Mapping[str, Any]:
    """What a caller is shown, as `ssl` spells it: both sides of a handshake in memory. Raises
    ssl.SSLError."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(here, there, server_side=True)
    client = believing(leaf).wrap_bio(there, here)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert() or {}


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} (edges.tls.{what}) cannot be read: {error.strerror}; `skerry certs public` "
            "makes a pair to try https with"
        ) from error


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or ""
    if reason == "KEY_VALUES_MISMATCH":
        return "do not belong together: the key is another certificate's"
    return f"do not serve: {error}"


def _stamp(files: EdgeFiles) -> _Stamp:
    try:
        return tuple(
            (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            for stat in (path.stat() for path in (files.certificate, files.key))
        )
    except OSError:
        return ()
