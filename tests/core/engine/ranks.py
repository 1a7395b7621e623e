"""The ranks of a plan as threads of the test's own process, over real sockets.

They are what the rank processes run, without the time to start those: every rank has its own groups,
pool and connections, and meets the others at a port.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from core.engine import batch
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, Row
from core.engine.runner_split import FollowingRank, LeadingRunner
from core.engine.split_rank import SplitRank
from core.parallel import Plan

T = TypeVar("T")


def configs(folder: Path, plan: Plan, **changes: object) -> Iterator[RankConfig]:
    """One for each rank; rank 0 is given the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for rank in range(plan.ranks):
        fields: dict[str, object] = {
            "node": "n", "socket_fd": -1, "source": str(folder), "kv_blocks": 64, "dtype": "float32",
            "rank": rank, "plan": plan, "master_port": port, "master_secret": "s",
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


@contextmanager
def steppers(folder: Path, plan: Plan, **changes: object) -> Iterator[Steppers]:
    found = Steppers(folder, plan, **changes)
    try:
        yield found
    finally:
        found.close()
