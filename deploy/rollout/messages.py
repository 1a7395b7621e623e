"""What the command line asks a running `skerry up`, and what it is told: a line of JSON each."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.config import Scripted
from core.types import Role


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


class AddModel(msgspec.Struct, frozen=True, kw_only=True, tag="add_model", tag_field="ask"):
    """`source` as in a topology, a path absolute; its file has `digest`, "" where nobody looked.
    `regions`: all when empty. `roles`: a node of each in every region. `like`: a node whose
    settings the new ones have. `pool`: they share its places; `on_demand`: they run when somebody
    asks."""

    name: str
    source: str
    digest: str = ""
    aliases: tuple[str, ...] = ()
    context: int | None = None
    engine: Literal["torch", "scripted"] = "torch"
    scripted: Scripted | None = None
    regions: tuple[str, ...] = ()
    roles: tuple[Role, ...] = (Role.COMBINED,)
    like: str = ""
    pool: str = ""
    gpus: tuple[int, ...] = ()
    kv_tokens: int = 0
    on_demand: bool = False
    dry_run: bool = False
    idle_s: float = 600.0
    ready_s: float = 600.0


class RemoveModel(msgspec.Struct, frozen=True, kw_only=True, tag="remove_model", tag_field="ask"):
    """Its nodes end what they have first."""

    name: str
    dry_run: bool = False
    idle_s: float = 600.0
    ready_s: float = 120.0


class View(msgspec.Struct, frozen=True, tag="view", tag_field="ask"):
    """Who runs?"""


Change = Deploy | AddModel | RemoveModel
Ask = Change | View


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
