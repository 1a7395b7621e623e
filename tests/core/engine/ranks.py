"""The ranks of a plan as threads of the test's own process, over real sockets.

They are what the rank processes run, without the time to start those: every rank has groups, pool
and connections of its own, and meets the others at a port.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from core.engine import batch
from core.engine.mesh import Mesh
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, Row
from core.engine.process_groups import TorchGroup, Traffic, gloo
from core.engine.runner_split import FollowingRank, LeadingRunner
from core.engine.split_rank import SplitRank
from core.errors import NodeLost
from core.parallel import Plan

T = TypeVar("T")
PATIENCE_S = 30.0


def configs(folder: Path, plan: Plan, **changes: object) -> Iterator[RankConfig]:
    """One for each rank; rank 0 is given the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for rank in range(plan.ranks):
        fields: dict[str, object] = {
            "node": "n", "socket_fd": -1, "source": str(folder), "kv_blocks": 64,
            "dtype": "float32", "rank": rank, "local_rank": rank, "plan": plan, "master_port": port,
            "master_secret": "s",
            "master_fd": listener.detach() if rank == 0 else -1,
        }  # fmt: skip
        yield RankConfig(**(fields | changes))  # type: ignore[arg-type]  # a test's own fields


class Steppers:
    """The ranks without their loop: all are given the same tokens at once."""

    def __init__(self, folder: Path, plan: Plan, **changes: object) -> None:
        self.plan = plan
        self.ranks = [SplitRank(config) for config in configs(folder, plan, **changes)]
        self._threads = ThreadPoolExecutor(plan.ranks)
        self.loaded: list[LoadedModel] = self.each(
            lambda rank: rank.load(lambda stage, fraction: None)
        )

    def each(self, work: Callable[[SplitRank], T]) -> list[T]:
        """On all ranks at once."""
        return list(self._threads.map(work, self.ranks))

    def forced(self, rows: Sequence[Row], dp_rank: int = 0) -> Tensor:
        """Logits of every token of `rows`; other pools have none."""
        tokens = batch.build(rows)
        tokens = replace(tokens, sampled=torch.arange(len(tokens.tokens)))

        def work(rank: SplitRank) -> Tensor | None:
            with torch.inference_mode():
                if self.plan.place(rank.config.rank).dp_rank == dp_rank:
                    return rank.stepper.forward(tokens)
                rank.stepper.stage.idle()
                return None

        return torch.cat([logits for logits in self.each(work) if logits is not None], -1)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()


class Crowd:
    """A group of `size` ranks, each on a thread of its own."""

    def __init__(self, size: int) -> None:
        store = HashStore()
        ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one, other in itertools.combinations(range(size), 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        self.traffic = [Traffic() for _ in range(size)]
        self._threads = ThreadPoolExecutor(size)

        def make(rank: int) -> TorchGroup:
            pg = gloo(store, rank, size, "127.0.0.1")
            return TorchGroup(pg, Mesh(rank, ends[rank]), self.traffic[rank])

        self.groups = list(self._threads.map(make, range(size)))

    def each(self, work: Callable[[TorchGroup], T]) -> list[T]:
        """On all ranks at once."""
        return list(self._threads.map(work, self.groups))

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._threads.shutdown()


@contextmanager
def serving(folder: Path, plan: Plan, **changes: object) -> Iterator[list[LeadingRunner]]:
    """The leaders of all pools, once their ranks have loaded and follow."""
    ranks = [
        LeadingRunner(config)
        if plan.leader(plan.place(config.rank).dp_rank) == config.rank
        else FollowingRank(config)
        for config in configs(folder, plan, **changes)
    ]
    with ThreadPoolExecutor(2 * plan.ranks) as threads:

        def live(rank: FollowingRank) -> str:
            rank.load(lambda stage, fraction: None)
            with pytest.raises(NodeLost) as end:
                rank.compute()
            return str(end.value)

        leaders = [rank for rank in ranks if isinstance(rank, LeadingRunner)]
        lives = [threads.submit(live, rank) for rank in ranks if isinstance(rank, FollowingRank)]
        loads = [threads.submit(rank.load, lambda stage, fraction: None) for rank in leaders]
        try:
            for load in loads:
                load.result(PATIENCE_S)
            yield leaders
        finally:
            for rank in ranks:
                rank.close()
            assert all("has gone" in life.result(PATIENCE_S) for life in lives)


@contextmanager
def steppers(folder: Path, plan: Plan, **changes: object) -> Iterator[Steppers]:
    found = Steppers(folder, plan, **changes)
    try:
        yield found
    finally:
        found.close()
