"""Ranks of a plan on devices that stand in for GPUs: their graphs are calls that are made again,
and gloo carries what NCCL would."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Store

from core.engine import rank
from core.engine.gpu.device import HostDevice
from core.engine.gpu.rank import Kit
from core.engine.gpu.runner import DeviceFollower, DeviceRunner
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel
from core.engine.process_groups import Backend, gloo
from core.errors import NodeLost
from core.kv.memory import attach
from core.parallel import Plan
from tests.core.engine.gpu.ahead import AheadOps
from tests.core.engine.ranks import PATIENCE_S, configs


class Recorder(HostDevice):
    """Notes captures and replays, in order. `slow_s`: how long a capture takes here; the
    `refused`-th cannot be made."""

    def __init__(self, slow_s: float = 0.0, refused: int = -1) -> None:
        self.told: list[str] = []
        self._slow_s = slow_s
        self._refused = refused
        self._captures = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        number = self._captures
        self._captures += 1
        if self._slow_s:
            time.sleep(self._slow_s)
        if number == self._refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.told.append(f"capture {number}")

        def replay() -> None:
            self.told.append(f"replay {number}")
            run()

        return replay


def gloo_for_nccl(store: Store, at: int, members: Sequence[int], where: torch.device) -> Backend:
    return gloo(store, at, len(members), "127.0.0.1")


def kit(device: Callable[[], HostDevice]) -> Kit:
    return Kit(
        device=device,
        rehearse=lambda model, dtype, where: None,
        ops=lambda where, dtype: AheadOps(dtype),
        backend=gloo_for_nccl,
    )


@dataclass
class Node:
    """`loaded` by rank; `leaders` of all pools."""

    leaders: list[DeviceRunner]
    loaded: dict[int, LoadedModel]

    def block(self, rank: int, group: int, number: int) -> memoryview:
        """Of a rank's memory, as its front sees it."""
        geometry = self.loaded[rank].geometry
        start, end = geometry.block_span(group, number)
        return memoryview(attach(self.loaded[rank].memory_fd, geometry.pool_bytes))[start:end]


@contextmanager
def serving(
    folder: Path, plan: Plan, devices: Sequence[HostDevice], **changes: object
) -> Iterator[Node]:
    """Once all ranks have loaded and follow; `devices` by rank."""
    ranks: list[DeviceRunner | DeviceFollower] = []
    for config, device in zip(configs(folder, plan, **changes), devices, strict=True):
        leads = plan.leader(plan.place(config.rank).dp_rank) == config.rank
        made = DeviceRunner if leads else DeviceFollower
        ranks.append(made(config, kit(lambda device=device: device)))  # type: ignore[misc]  # bound now
    node = Node([one for one in ranks if isinstance(one, DeviceRunner)], {})
    with ThreadPoolExecutor(plan.ranks) as threads:

        def live(rank: int, one: DeviceRunner | DeviceFollower) -> str:
            node.loaded[rank] = one.load(lambda stage, fraction: None)
            if isinstance(one, DeviceRunner):
                return ""
            with pytest.raises(NodeLost) as end:
                one.compute()
            return str(end.value)

        lives = [threads.submit(live, *one) for one in enumerate(ranks)]
        try:
            for one, life in zip(ranks, lives, strict=True):
                if one in node.leaders:
                    life.result(PATIENCE_S)
            yield node
        finally:
            for one in ranks:
                one.close()
            ends = [life.result(PATIENCE_S) for life in lives]
            assert all("gone" in end for end in ends if end)


def settled(leader: DeviceRunner) -> None:
    """Until no graph is on its way and none is wanted."""
    for _ in range(1000):
        with leader._changing:
            if leader._capturing is None and leader._sizes.next(idle=True) is None:
                return
        threading.Event().wait(0.01)
    raise AssertionError("graphs are never settled")


def main() -> int:
    """A rank process with such a device; what it has captured goes to stderr as it happens."""

    class Telling(Recorder):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            kept = super().capture(run)
            sys.stderr.write(self.told[-1] + "\n")
            return kept

    def made(config: RankConfig) -> Kit:
        return kit(lambda: Telling(slow_s=0.05 * config.rank))

    return rank.main(
        rank.Makers(
            lambda config: DeviceRunner(config, made(config)),
            lambda config: DeviceFollower(config, made(config)),
        )
    )


if __name__ == "__main__":
    sys.exit(main())
