"""How our own processes know an edge that speaks https: by the very certificate it shows.

They dial it at the address of the topology, mostly on loopback, while its certificate names the
host that callers use, so names cannot be compared. What can be: an edge leaves a copy of the
certificate that it shows in the state folder, and the topology names the file of the next one.
Exactly these are believed, and no authority; what is in neither file any more is believed for a
while yet, since a process of the edge may not have looked. An edge of which nothing lies on this
machine is believed as any caller would: by the system's authorities and its name.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import Edge, World

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
OVERLAP_S = 60.0
"""How long a certificate that was replaced may still be shown by some process of its edge: they
look for new ones every few seconds."""
_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which `ssl` has no name for."""


@dataclass(frozen=True, slots=True)
class EdgeFiles:
    """`shown`: where the edge leaves the certificates that its processes show now, for `Pins`."""

    certificate: Path
    key: Path
    shown: Path


def files_of(world: World, edge: Edge) -> EdgeFiles | None:
    """None where it speaks plaintext."""
    if edge.tls is None:
        return None
    return EdgeFiles(
        certificate=world.state / edge.tls.certificate,
        key=world.state / edge.tls.key,
        shown=world.state / "shown" / f"{edge.name}.crt",
    )


def certificates_in(pem: bytes) -> list[str]:
    """Those of a file. In a chain the first one is its owner's own."""
    return [one.decode("ascii") for one in _BLOCK.findall(pem)]


def believing(*certificates: str) -> ssl.SSLContext:
    """A context for who dials one that shows one of exactly these. Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = (
        False  # who has the key of this certificate is meant, whatever its name
    )
    # It need not be an authority's, and one that has ended says still who it is: the commands that
    # an operator needs then must not end with it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    for one in certificates:
        context.load_verify_locations(cadata=one)
    return context


class _Standing(ssl.SSLContext):
    """Connects by `now`: a context forgets no certificate, so another one takes its place, and
    whoever was given this one need not hear of it. Believes nobody by itself."""

    now: ssl.SSLContext

    def __new__(cls) -> _Standing:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self.now.wrap_socket(*args, **kwargs)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.now.wrap_bio(*args, **kwargs)


class Pins:
    """Of one edge. `context` stays one and the same; `look` has it believe what the files have now,
    and for `OVERLAP_S` what they had before. `clock`: seconds."""

    def __init__(self, files: EdgeFiles, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._stamps: dict[Path, tuple[int, int, int]] = {}
        self._found: dict[Path, list[str]] = {}
        self._gone: dict[str, float] = {}
        """What was believed and is in no file any more: since when that is known."""
        self._believed: set[str] = set()
        if not any(path.exists() for path in (files.shown, files.certificate)):
            self._standing = None
            self.context = ssl.create_default_context()
            return
        self._standing = self.context = _Standing()
        self._standing.now = believing()
        self.look()

    def look(self) -> None:
        """Before a connection is made."""
        if self._standing is None:
            return
        now = self._clock()
        here = {*self._in(self._files.shown), *self._in(self._files.certificate)}
        for one in self._believed - here:
            self._gone.setdefault(one, now)
        self._gone = {
            one: since
            for one, since in self._gone.items()
            if one not in here and now - since < OVERLAP_S
        }
        believed = here | self._gone.keys()
        if believed != self._believed:
            self._standing.now = believing(*sorted(believed))
            self._believed = believed

    def _in(self, path: Path) -> Collection[str]:
        """The edge's own certificates in a file; none while it is being written."""
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._stamps.get(path) != stamp:
                found = certificates_in(path.read_bytes())
                own = found if path == self._files.shown else found[:1]
                self._found[path] = list(filter(_serves, own))
                self._stamps[path] = stamp
        except OSError:
            self._stamps.pop(path, None)
            return ()
        return self._found[path]


def _serves(certificate: str) -> bool:
    """What is framed like one need not be one."""
    try:
        believing(certificate)
    except ssl.SSLError:
        return False
    return True


def pins_of(world: World, edge: Edge) -> Pins | None:
    """None where it speaks plaintext."""
    files = files_of(world, edge)
    return None if files is None else Pins(files)
