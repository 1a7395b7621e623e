"""Which worker of its edge a process is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Seat:
    """Worker `number` of `of`, from 1. `folder` holds the workers' own sockets; `lifeline` is a
    pipe end that closes when the supervisor is gone."""

    number: int = 1
    of: int = 1
    address: str | None = None
    """Where to listen, when the topology leaves the port to the system."""
    folder: Path | None = None
    lifeline: int | None = None
    listeners: tuple[int, ...] = ()
    """Listening sockets that it was started with: it accepts from them and binds none itself."""
    plain: tuple[int, ...] = ()
    """More of them, in plaintext also where callers speak https: our own processes come in there.
    """
    plain_address: str | None = None
    """Where to listen for them together with the other workers."""

    @property
    def name(self) -> str:
        """For the log: nothing for the only one."""
        return f"/{self.number}" if self.of > 1 else ""

    def socket(self, number: int) -> Path:
        assert self.folder is not None, "a crew has a folder"
        return self.folder / f"{number}.sock"


ALONE = Seat()
