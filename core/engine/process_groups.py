"""`core.models.collectives.Group` over torch.distributed (gloo) and sockets of our own.

The groups of a rank are made side by side on one store, without torch's process-wide default group.
A peer that has gone is noticed by its closed socket, at the next call at the latest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
        first = config.rank == 0
        self._rank = config.rank
        self._secret = config.master_secret
        try:
            self.store = TCPStore(
                config.master_addr,
                config.master_port,
                is_master=first,
                wait_for_workers=False,
                timeout=timedelta(seconds=MEET_S),
                master_listen_fd=config.master_fd if first and config.master_fd >= 0 else None,
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

    def group(self, name: str, members: Sequence[int], traffic: Traffic) -> TorchGroup:
        """The group of `members`, this rank among them; all of them must ask for it. Returns when
        they are connected. Raises NodeLost."""
        store = PrefixStore(name, self.store)
        at, size = members.index(self._rank), len(members)
        mesh = connect(members, self._rank, self.address, self._secret, _Addresses(self, name))
        try:
            return TorchGroup(gloo(store, at, size, self.address), mesh, traffic)
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

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...


def gloo(store: Store, rank: int, size: int, address: str) -> Backend:
    """Returns when all have come. Raises RuntimeError."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=_CALL_S)
    return ProcessGroupGloo(store, rank, size, options)  # type: ignore[return-value]  # as above


class TorchGroup:
    """A `Group`, and messages between two of its ranks. For one thread at a time. Small tensors,
    and rows to and from experts, go through `mesh`, all others through torch's process group.

    Every method raises NodeLost when a peer has gone.
    """

    def __init__(self, pg: Backend, mesh: Mesh, traffic: Traffic) -> None:
        self._pg = pg
        self._mesh = mesh
        self._traffic = traffic
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self.rank: int = pg.rank()
        self.size: int = pg.size()

    def sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        self._traffic.sent += 2 * (self.size - 1) * x.nbytes // self.size
        mesh = self._small(x)
        if mesh is not None:
            mesh.sum(x.view(-1))
        else:
            self._wait(lambda: self._pg.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        self._traffic.sent += (self.size - 1) * x.nbytes
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        mesh = self._small(x)
        if mesh is not None:
            mesh.gather(out.view(self.size, -1), x.view(-1))
        else:
            self._wait(lambda: self._pg._allgather_base(out.view(-1), x.view(-1)))
        return out

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        sizes = torch.tensor(counts, dtype=torch.int64)
        coming = torch.empty_like(sizes)
        self._traffic.sent += (self.size - 1) * sizes.element_size()
        ones = [1] * self.size
        self._mesh.swap(_parts(sizes, ones), _parts(coming, ones))
        expected = tuple(coming.tolist())
        return self._carried(rows, counts, expected), expected

    def carry(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        self._traffic.rows += (sum(counts) - counts[self.rank]) * rows[:1].nbytes
        return self._carried(rows, counts, expected)

    def _carried(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        out = rows.new_empty((sum(expected), *rows.shape[1:]))
        self._traffic.sent += (sum(counts) - counts[self.rank]) * rows[:1].nbytes
        self._mesh.swap(_parts(rows.contiguous(), counts), _parts(out, expected))
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Does not wait for the receiver. `x` must not be changed afterwards."""
        self._traffic.sent += x.nbytes
        mesh = self._small(x)
        if mesh is not None:
            mesh.send(x.contiguous(), to)
            return
        self._sending = [one for one in self._sending if not one[0].is_completed()]
        x = x.contiguous()
        try:
            self._sending.append((self._pg.send([x], to, 0), x))
        except RuntimeError as error:
            raise _lost(error) from error

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Fill `out`, which has the shape of what `source` sends next."""
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
            raise _lost(error) from error


def _parts(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """So many rows for each rank, in order."""
    edges = itertools.accumulate(counts, initial=0)
    return [rows[first:last] for first, last in itertools.pairwise(edges)]


class _Begin(Protocol):
    def __call__(self) -> dist.Work: ...


def _lost(error: RuntimeError) -> NodeLost:
    return NodeLost(f"a peer rank has gone: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@dataclass(slots=True)
class Groups:
    """What a rank computes with: `tensor` shares its layers, `experts` its experts; `line` are the
    ranks of all stages in its place, in order."""

    tensor: Group = field(default_factory=Alone)
    experts: Group = field(default_factory=Alone)
    line: TorchGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def close(self) -> None:
        for group in (self.tensor, self.experts, self.line):
            if isinstance(group, TorchGroup):
                group.close()


def make_groups(config: RankConfig, meeting: Meeting) -> Groups:
    """All groups of `config.plan` that this rank is in. Every rank must make its own at about the
    same time: each group waits for its members. Raises NodeLost."""
    plan, rank = config.plan, config.rank
    place = plan.place(rank)
    groups = Groups()
    if plan.tp > 1:
        first = rank - place.tp_rank
        members = range(first, first + plan.tp)
        groups.tensor = meeting.group(f"tensor/{first}", members, groups.traffic)
    if plan.ep > 1:
        first = rank - rank % plan.stage_ranks % plan.ep
        members = range(first, first + plan.ep)
        groups.experts = meeting.group(f"experts/{first}", members, groups.traffic)
    if plan.pp > 1:
        first = rank % plan.stage_ranks
        members = range(first, plan.ranks, plan.stage_ranks)
        groups.line = meeting.group(f"line/{first}", members, groups.traffic)
    return groups
