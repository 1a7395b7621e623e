"""`core.models.collectives.Group` over torch.distributed (gloo) and sockets of our own.

The groups of a rank are made side by side on one store, without torch's process-wide default group.
A peer that has gone is noticed by its closed socket, at the next call at the latest. Where a rank
computes on a device, each group has a second side for what lies there (`core.engine.gpu.groups`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from core.engine.crew import Address, own_address
from core.engine.mesh import SMALL_BYTES, Mesh, connect
from core.engine.messages import RankConfig
from core.errors import NodeLost
from core.models.collectives import Alone, Group

_Told = TypeVar("_Told")

MEET_S = 600.0
"""How long a rank waits for the others to come: each may read weights first."""
_CALL_S = 600.0
"""A peer that lives and does not answer is the front's to find; this only ends what nobody ends."""


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has sent to others, as `core.models.collectives` counts them, and those
    of them that were rows on their way to experts or back."""

    sent: int = 0
    rows: int = 0


class Meeting:
    """Where the ranks of a node find each other: a store that rank 0 serves."""

    def __init__(self, config: RankConfig) -> None:
        """Raises NodeLost when rank 0 does not come."""
        self.first = config.rank == 0
        self._rank = config.rank
        self._secret = config.master_secret
        try:
            self.store = TCPStore(
                config.master_addr,
                config.master_port,
                is_master=self.first,
                wait_for_workers=False,
                timeout=timedelta(seconds=MEET_S),
                master_listen_fd=config.master_fd if self.first and config.master_fd >= 0 else None,
            )
        except RuntimeError as error:
            where = f"{config.master_addr}:{config.master_port}"
            raise NodeLost(f"the ranks cannot meet at {where}: {_first_line(error)}") from error
        self.address = own_address((config.master_addr, config.master_port))

    def tell(self, key: str, value: object) -> None:
        self.store.set(key, msgspec.json.encode(value).decode())

    def hear(self, key: str, kind: type[_Told]) -> _Told:
        """Waits until somebody has told it."""
        try:
            return msgspec.json.decode(self.store.get(key), type=kind)
        except RuntimeError as error:
            raise NodeLost(f"no rank said {key}: {_first_line(error)}") from error

    def group(
        self, name: str, members: Sequence[int], traffic: Traffic, beside: Beside | None = None
    ) -> tuple[TorchGroup, SideGroup]:
        """The group of `members`, this rank among them; all of them must ask for it. Returns when
        they are connected: the group for tensors on the host, and what `beside` makes of it for
        those on a device; None: the same again. Raises NodeLost."""
        at, size = members.index(self._rank), len(members)
        mesh = connect(members, self._rank, self.address, self._secret, _Addresses(self, name))
        try:
            pg = gloo(PrefixStore(name, self.store), at, size, self.address)
            host = TorchGroup(pg, mesh, traffic)
            if beside is None:
                return host, host
            store = PrefixStore(f"{name}/device", self.store)
            return host, beside(store, at, members, host)
        except RuntimeError as error:
            raise NodeLost(f"group {name} did not come together: {_first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Those of one group, in the store."""

    meeting: Meeting
    group: str

    def tell(self, member: int, address: Address) -> None:
        self.meeting.tell(f"{self.group}/at/{member}", address)

    def hear(self, member: int) -> Address:
        return self.meeting.hear(f"{self.group}/at/{member}", tuple[str, int])


class Backend(Protocol):
    """What is used of torch's process groups."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[Tensor], /) -> dist.Work: ...

    def _allgather_base(self, out: Tensor, own: Tensor, /) -> dist.Work: ...

    def alltoall_base(
        self, out: Tensor, own: Tensor, out_sizes: list[int], own_sizes: list[int], /
    ) -> dist.Work: ...

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...


def gloo(store: Store, rank: int, size: int, address: str) -> Backend:
    """Returns when all have come. Raises RuntimeError."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=_CALL_S)
    return ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]  # as above


class SideGroup(Group, Protocol):
    """A `Group` whose ranks also send each other messages."""

    def send(self, x: Tensor, to: int) -> None:
        """Does not wait for the receiver. `x` must not be changed afterwards."""
        ...

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Fill `out`, which has the shape of what `source` sends next."""
        ...

    def close(self) -> None: ...


class TorchGroup:
    """A `SideGroup` of the host. For one thread at a time. Small tensors, and rows to and from
    experts, go through `mesh`, all others through torch's process group.

    Every method raises NodeLost when a peer has gone.
    """

    def __init__(self, pg: Backend, mesh: Mesh, traffic: Traffic) -> None:
        self._pg = pg
        self._mesh = mesh
        self.traffic = traffic
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self.rank: int = pg.rank()
        self.size: int = pg.size()

    def sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        self.traffic.sent += 2 * (self.size - 1) * x.nbytes // self.size
        mesh = self._small(x)
        if mesh is not None:
            mesh.sum(x.view(-1))
        else:
            self._wait(lambda: self._pg.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        self.traffic.sent += (self.size - 1) * x.nbytes
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        mesh = self._small(x)
        if mesh is not None:
            mesh.gather(out.view(self.size, -1), x.view(-1))
        else:
            self._wait(lambda: self._pg._allgather_base(out.view(-1), x.view(-1)))
        return out

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        expected = self.expected(counts)
        return self._carried(rows, counts, expected), expected

    def expected(self, counts: Sequence[int]) -> tuple[int, ...]:
        """How many each rank has for this one, where this one has `counts` for them."""
        sizes = torch.tensor(counts, dtype=torch.int64)
        coming = torch.empty_like(sizes)
        self.traffic.sent += (self.size - 1) * sizes.element_size()
        ones = [1] * self.size
        self._mesh.swap(_parts(sizes, ones), _parts(coming, ones))
        return tuple(coming.tolist())

    def carry(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        self.traffic.rows += (sum(counts) - counts[self.rank]) * rows[:1].nbytes
        return self._carried(rows, counts, expected)

    def _carried(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        out = rows.new_empty((sum(expected), *rows.shape[1:]))
        self.traffic.sent += (sum(counts) - counts[self.rank]) * rows[:1].nbytes
        self._mesh.swap(_parts(rows.contiguous(), counts), _parts(out, expected))
        return out

    def send(self, x: Tensor, to: int) -> None:
        self.traffic.sent += x.nbytes
        mesh = self._small(x)
        if mesh is not None:
            mesh.send(x.contiguous(), to)
            return
        self._sending = [one for one in self._sending if not one[0].is_completed()]
        x = x.contiguous()
        try:
            self._sending.append((self._pg.send([x], to, 0), x))
        except RuntimeError as error:
            raise lost(error) from error

    def receive(self, out: Tensor, source: int) -> Tensor:
        mesh = self._small(out)
        if mesh is not None:
            return mesh.receive(out, source)
        self._wait(lambda: self._pg.recv([out], source, 0))
        return out

    def close(self) -> None:
        """From any thread: whoever waits in the mesh gets NodeLost."""
        self._mesh.close()

    def _small(self, x: Tensor) -> Mesh | None:
        """The mesh, when `x` is for it: on all ranks alike, since shapes are."""
        return self._mesh if x.nbytes <= SMALL_BYTES else None

    def _wait(self, begin: _Begin) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise lost(error) from error


def _parts(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """So many rows for each rank, in order."""
    edges = itertools.accumulate(counts, initial=0)
    return [rows[first:last] for first, last in itertools.pairwise(edges)]


class _Begin(Protocol):
    def __call__(self) -> dist.Work: ...


def lost(error: RuntimeError) -> NodeLost:
    """What a call of torch's process groups means by it."""
    return NodeLost(f"a peer rank has gone: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


Beside = Callable[[Store, int, Sequence[int], TorchGroup], SideGroup]
"""(store, this rank's place, members, the group for the host) → the group for a device."""


@dataclass(slots=True)
class Groups:
    """What a rank computes with: `tensor` shares its layers, `experts` its experts; `line` are the
    ranks of all stages in its place, in order. `host` is `tensor` for tensors on the host, the same
    where nothing lies elsewhere."""

    tensor: Group = field(default_factory=Alone)
    experts: Group = field(default_factory=Alone)
    line: SideGroup | None = None
    host: Group = field(default_factory=Alone)
    traffic: Traffic = field(default_factory=Traffic)
    opened: list[SideGroup] = field(default_factory=list)

    def close(self) -> None:
        for group in self.opened:
            group.close()


def make_groups(config: RankConfig, meeting: Meeting, beside: Beside | None = None) -> Groups:
    """All groups of `config.plan` that this rank is in. Every rank must make its own at about the
    same time: each group waits for its members. Raises NodeLost."""
    plan, rank = config.plan, config.rank
    place = plan.place(rank)
    groups = Groups()

    def make(name: str, members: range) -> tuple[TorchGroup, SideGroup]:
        host, side = meeting.group(name, members, groups.traffic, beside)
        groups.opened.extend((host,) if side is host else (host, side))
        return host, side

    if plan.tp > 1:
        first = rank - place.tp_rank
        groups.host, groups.tensor = make(f"tensor/{first}", range(first, first + plan.tp))
    if plan.ep > 1:
        first = rank - rank % plan.stage_ranks % plan.ep
        _, groups.experts = make(f"experts/{first}", range(first, first + plan.ep))
    if plan.pp > 1:
        first = rank % plan.stage_ranks
        _, groups.line = make(f"line/{first}", range(first, plan.ranks, plan.stage_ranks))
    return groups
