"""Groups of ranks for tensors that lie on their devices: `process_groups`, over NCCL.

Calls are given to the device like kernels, so nothing here waits for it and a graph may keep what
it finds; only how many rows go to which expert's rank must be known to the host. A peer that has
gone leaves the device waiting: its closed connection to the leader is what tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from core.engine.process_groups import Backend, Beside, SideGroup, TorchGroup, lost
from core.errors import ConfigError

MakeBackend = Callable[[Store, int, Sequence[int]], Backend]
"""(store, this rank's place, members) → torch's process group of them."""
_CALL_S = 600.0


def nccl(store: Store, at: int, members: Sequence[int], where: torch.device) -> Backend:
    """NCCL's process group for `where`. Raises ConfigError where PyTorch was built without it."""
    if not dist.is_nccl_available():
        raise ConfigError("several ranks on CUDA devices need NCCL, which this PyTorch has not")
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_CALL_S)
    options.global_ranks_in_group = list(members)
    group = ProcessGroupNCCL(store, at, len(members), options)
    # Now, not at the first call: that may be one that is captured, which must not allocate.
    group.eager_connect_single_device(where)
    return group  # type: ignore[return-value]  # its stubs name fewer calls than it has


def on_device(make: MakeBackend) -> Beside:
    """Gives groups their side for the device."""

    def beside(store: Store, at: int, members: Sequence[int], host: TorchGroup) -> SideGroup:
        return DeviceGroup(make(store, at, members), host)

    return beside


class DeviceGroup:
    """A `process_groups.SideGroup`. `host`: the same ranks, for numbers that the host must know."""

    def __init__(self, pg: Backend, host: TorchGroup) -> None:
        self._pg = pg
        self._host = host
        self._traffic = host.traffic
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self.rank = host.rank
        self.size = host.size

    def sum(self, x: Tensor) -> Tensor:
        if x.numel():
            self._traffic.sent += 2 * (self.size - 1) * x.nbytes // self.size
            self._wait(lambda: self._pg.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> Tensor:
        self._traffic.sent += (self.size - 1) * x.nbytes
        x = x.contiguous()
        out = x.new_empty((self.size, *x.shape))
        self._wait(lambda: self._pg._allgather_base(out.view(-1), x.view(-1)))
        return out

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        expected = self._host.expected(counts)
        return self._carried(rows, counts, expected), expected

    def carry(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        self._traffic.rows += (sum(counts) - counts[self.rank]) * rows[:1].nbytes
        return self._carried(rows, counts, expected)

    def _carried(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        out = rows.new_empty((sum(expected), *rows.shape[1:]))
        self._traffic.sent += (sum(counts) - counts[self.rank]) * rows[:1].nbytes
        rows = rows.contiguous()
        self._wait(lambda: self._pg.alltoall_base(out, rows, list(expected), list(counts)))
        return out

    def send(self, x: Tensor, to: int) -> None:
        self._traffic.sent += x.nbytes
        self._sending = [one for one in self._sending if not one[0].is_completed()]
        x = x.contiguous()
        try:
            self._sending.append((self._pg.send([x], to, 0), x))
        except RuntimeError as error:
            raise lost(error) from error

    def receive(self, out: Tensor, source: int) -> Tensor:
        self._wait(lambda: self._pg.recv([out], source, 0))
        return out

    def close(self) -> None:
        """What the device still waits for ends with the process."""

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        """On a device: what is given to it later waits, not the host."""
        try:
            begin().wait()
        except RuntimeError as error:
            raise lost(error) from error
