"""How our own processes know an edge that speaks https: by the very certificate it shows.

They dial it at the address of the topology, mostly on loopback, while its certificate names the
host that callers use, so names cannot be compared. What can be: an edge leaves a copy of the
certificate that it shows in the state folder, and the topology names the file of the next one.
Exactly these are believed, and no authority. An edge of which nothing lies on this machine is
believed as any caller would: by the system's authorities and its name.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from core.config import Edge, World

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
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


class Pins:
    """Of one edge. `context` stays one and the same; `look` adds what has come since."""

    def __init__(self, files: EdgeFiles) -> None:
        self._files = files
        self._paths = (files.shown, files.certificate)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._pinned = any(path.exists() for path in self._paths)
        self.context = believing() if self._pinned else ssl.create_default_context()
        self.look()

    def look(self) -> None:
        """Before a connection is made. A file that is being written, or no certificate, adds
        nothing."""
        for path in self._paths if self._pinned else ():
            try:
                stat = path.stat()
                stamp = (stat.st_mtime_ns, stat.st_size)
                if self._stamps.get(path) == stamp:
                    continue
                found = certificates_in(path.read_bytes())
                own = found if path == self._files.shown else found[:1]
                for one in own:
                    self.context.load_verify_locations(cadata=one)
            except (OSError, ssl.SSLError):
                continue
            self._stamps[path] = stamp


def pins_of(world: World, edge: Edge) -> Pins | None:
    """None where it speaks plaintext."""
    files = files_of(world, edge)
    return None if files is None else Pins(files)
