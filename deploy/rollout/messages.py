"""What the command line asks a running `skerry up`, and what it is told: a line of JSON each."""

from __future__ import annotations

import msgspec


class Deploy(msgspec.Struct, frozen=True, kw_only=True, tag="deploy", tag_field="ask"):
    """Paths are absolute. `topology`: "" stays with the one that runs; `release`: "" leaves
    each process the one that it has."""

    unit: str
    topology: str = ""
    release: str = ""
    again: bool = False
    dry_run: bool = False
    canary: int | None = None
    watch_s: float = 0.0
    idle_s: float = 600.0
    ready_s: float = 120.0


class View(msgspec.Struct, frozen=True, tag="view", tag_field="ask"):
    """Who runs?"""


Ask = Deploy | View


class Said(msgspec.Struct, frozen=True, tag="said", tag_field="told"):
    line: str


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag="seen", tag_field="told"):
    """One process. `release`: its version and folder; `topology`: the file that it runs from."""

    name: str
    kind: str
    pid: int
    release: str
    folder: str
    topology: str
    up_s: float
    ended: str = ""
    """How, for one that stays down."""


class Ended(msgspec.Struct, frozen=True, tag="ended", tag_field="told"):
    """The last line. `error` "" is success."""

    error: str = ""


Told = Said | Seen | Ended
