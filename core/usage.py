"""The usage ledger: one line for each request that was let in, and how it is read back.

A process writes `FOLDER/DAY/WRITER.jsonl`, a file of its own, so that two never share a line; DAY
is UTC's of the moment of writing. A record goes out in one write before the caller is sent the
last event of its answer, so that no usage was sent which the ledger lacks; one that was written
while its process was killed may never have been sent. It survives the death of the process, not a
loss of power, which may take the last seconds. A torn last line is no JSON and is skipped.

Counts only: no text of a prompt or an answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from core.types import Usage


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`complete`: the caller was sent these counts as the usage of a whole answer. Otherwise they
    are what was delivered before the request ended as `outcome` (an error code)."""

    id: str
    at: float
    """Unix seconds."""
    edge: str
    tenant: str
    key: str
    """ID of the API key; "-" for a caller without one."""
    model: str
    region: str
    dialect: str
    outcome: str
    prompt: int
    cached: int
    completion: int
    complete: bool
    worker: str = ""
    """The Worker that asked; "" for a caller who asked by HTTP."""

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt, completion_tokens=self.completion, cached_tokens=self.cached
        )

    @property
    def day(self) -> str:
        return day_of(self.at)


def day_of(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


class UsageWriter:
    """Appends to the file of the present day. `name` must be of one process alone."""

    def __init__(self, folder: Path, name: str, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._name = name
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode
        self._day = ""
        self._file = -1
        self._torn = False

    def write(self, record: UsageRecord) -> None:
        """Raises OSError: where nothing can be written down, nothing should be sent."""
        self._turn(day_of(self._clock()))
        line = self._encode(record) + b"\n"
        line = b"\n" + line if self._torn else line
        self._torn = True  # until all of it is out
        if os.write(self._file, line) != len(line):
            raise OSError("a usage record was written in part")
        self._torn = False

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._day = -1, ""

    def _turn(self, day: str) -> None:
        if day == self._day:
            return
        self.close()
        folder = self._folder / day
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{self._name}.jsonl", flags, 0o600)
        self._day, self._torn = day, os.fstat(self._file).st_size > 0


class UsageReader:
    """Reads ledgers, each request once: a record that is there twice (a copied file, a repeated
    poll) counts once, and a complete one before one that is not."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(UsageRecord)
        self.torn = 0
        """Lines that were no records."""

    def read(self, folder: Path, *, since: str = "", until: str = "9") -> list[UsageRecord]:
        """Records of the days `since` to `until` (YYYY-MM-DD), both included."""
        found: dict[str, UsageRecord] = {}
        for path in sorted(folder.glob("*/*.jsonl")):
            if since <= path.parent.name <= until:
                for record in self._lines(path):
                    before = found.get(record.id)
                    if before is None or (record.complete and not before.complete):
                        found[record.id] = record
        return list(found.values())

    def _lines(self, path: Path) -> Iterator[UsageRecord]:
        with path.open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    yield self._decoder.decode(line)
                except msgspec.MsgspecError:
                    self.torn += 1
