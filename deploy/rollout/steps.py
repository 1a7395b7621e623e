"""The steps of a rollout, as they are planned, shown by `--dry-run` and taken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    EDGE = "edge"
    REGION = "region"
    ROUTER = "router"
    """One of several of a region; the only one is replaced with its region."""
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Rest:
    """What rests gets nothing new and ends what it has; a region that is `leaving` also what is
    queued in it. `but`: routers that did not answer; they are left out where they still do not."""

    kind: Kind
    name: str
    resting: bool
    leaving: bool = False
    but: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{'drain' if self.resting else 'undrain'} {self.kind} {self.name}"
        if not self.but or not self.resting:
            return what
        one = len(self.but) == 1
        who = f"{'router' if one else 'routers'} {', '.join(self.but)}"
        lost = f"{'does' if one else 'do'} not answer and {'is' if one else 'are'} left out"
        return f"{what} ({who} {lost}: what is queued there stays)"


@dataclass(frozen=True, slots=True)
class Idle:
    """`must`: what still runs after the patience is a failure, else it is broken off. `but`: see
    `Rest`."""

    kind: Kind
    name: str
    must: bool = True
    but: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"wait until {self.kind} {self.name} is idle"


@dataclass(frozen=True, slots=True)
class Empty:
    """Of queued requests, for which nobody waits here; what they used is written down elsewhere.
    `but`: see `Rest`."""

    region: str
    but: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"wait until nothing is queued in region {self.region}"


@dataclass(frozen=True, slots=True)
class Replace:
    """Stop and start. `back`: start what ran before the rollout."""

    names: tuple[str, ...]
    back: bool = False

    def __str__(self) -> str:
        return f"replace {', '.join(self.names)}{_as_before(self.back)}"


@dataclass(frozen=True, slots=True)
class Start:
    """What did not run before. `later`: when somebody asks for its model."""

    name: str
    later: bool = False

    def __str__(self) -> str:
        if self.later:
            return f"take in {self.name}, which starts when somebody asks for its model"
        return f"start {self.name}"


@dataclass(frozen=True, slots=True)
class Reread:
    """A router goes on with the topology that is to be, without a new start. `back`: with the one
    that it had. `mute`: it did not answer; where it still does not, it reads the change when it is
    started again."""

    router: str
    back: bool = False
    mute: bool = False

    def __str__(self) -> str:
        said = f"tell router {self.router} of the change{_as_before(self.back)}"
        return f"{said} (it does not answer, and reads it when it starts)" if self.mute else said


@dataclass(frozen=True, slots=True)
class Stop:
    """What is not to run any more."""

    name: str

    def __str__(self) -> str:
        return f"stop {self.name}"


@dataclass(frozen=True, slots=True)
class Leave:
    """An edge that is not to run any more. What it still has after the patience is broken off: its
    new callers have been turned away already."""

    edge: str

    def __str__(self) -> str:
        return f"let edge {self.edge} accept nothing more, end with its last answer, and be gone"


@dataclass(frozen=True, slots=True)
class Shelve:
    """Workers for an edge that is new, before it starts. `back`: take them away again."""

    edge: str
    workers: tuple[str, ...]
    back: bool = False

    def __str__(self) -> str:
        what = ", ".join(self.workers)
        if self.back:
            return f"take the Workers {what} from edge {self.edge}"
        return f"copy the Workers {what} from the other edges to edge {self.edge}"


@dataclass(frozen=True, slots=True)
class Hosting:
    """An edge serves its Workers; one that does not start there is told."""

    edge: str

    def __str__(self) -> str:
        return f"wait until edge {self.edge} serves its Workers"


@dataclass(frozen=True, slots=True)
class Beside:
    """A second process (or crew) of an edge on the same port; the first ends with its last
    answer."""

    edge: str
    back: bool = False

    def __str__(self) -> str:
        return (
            f"start another process of edge {self.edge} on its port{_as_before(self.back)}, wait "
            "until it can answer, let the first end with its last answer"
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """Edges, routers and nodes by name. `but`: see `Rest`; nodes need not have joined those."""

    names: tuple[str, ...]
    but: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"wait until {', '.join(self.names)} {'is' if len(self.names) == 1 else 'are'} ready"


@dataclass(frozen=True, slots=True)
class Heard:
    """Every edge hears the region again."""

    region: str

    def __str__(self) -> str:
        return f"wait until every edge hears region {self.region}"


@dataclass(frozen=True, slots=True)
class Weigh:
    """0 is the topology's own. `but`: see `Rest`."""

    region: str
    weight: int
    but: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = str(self.weight) if self.weight else "as the topology has it"
        return f"weight of region {self.region}: {shown}"


@dataclass(frozen=True, slots=True)
class Watch:
    """Compare the region with what it was and with the others; past a bound the rollout fails."""

    region: str
    seconds: float

    def __str__(self) -> str:
        return f"watch errors and first deltas of region {self.region} for {self.seconds:g} s"


Step = (
    Rest | Idle | Empty | Replace | Reread | Start | Stop | Leave | Shelve | Hosting | Beside
    | Ready | Heard | Weigh | Watch
)  # fmt: skip


def _as_before(back: bool) -> str:
    return " by what it was" if back else ""
