"""What a little region is asked with and told by: steps, placements, answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.events import Done, Event
from core.types import NodeName, PoolId
from regional.costs import PullPlan
from regional.dispatch import Dispatcher, Placed
from regional.placement import Ask, Placement, Reason
from regional.reading import Reading


class Steps:
    """Every message, command and piece is a step; `fault` comes just before step `at`."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.at = -1
        self.fault: Callable[[], None] = lambda: None

    def hop(self, label: str) -> None:
        self.labels.append(label)
        if len(self.labels) - 1 == self.at:
            self.fault()


class Forced(Dispatcher):
    """Places the first attempt of each request as the test wants, all others as always."""

    first: Callable[[], Placement] | None = None

    async def place(
        self, ask: Ask, reading: Reading, *, age: int, priority: int, again: bool = False,
        wait: bool = True,
    ) -> Placed:  # fmt: skip
        if self.first is None or again:
            return await super().place(
                ask, reading, age=age, priority=priority, again=again, wait=wait
            )
        wanted = self.first()
        prefill = source = None
        if wanted.prefill is not None:
            prefill = self._charged(wanted.prefill, prefill_tokens=1)
        decode = self._charged(wanted.decode, prefill_tokens=None, answer_tokens=1)
        if wanted.pull is not None:
            source = self._charged(wanted.pull.source, prefill_tokens=None)
        return Placed(wanted, prefill, decode, reusable_tokens=0, source=source)


def _pool(node: str) -> PoolId:
    return PoolId(NodeName(node), 0)


def split(prefill: str, decode: str, pull: PullPlan | None = None) -> Placement:
    return Placement(
        _pool(prefill), _pool(decode), Reason.SPLIT, compute_tokens=1, cached_tokens=0,
        pull=pull,
    )  # fmt: skip


def direct(decode: str, pull: PullPlan | None = None) -> Placement:
    return Placement(
        None, _pool(decode), Reason.COMBINED, compute_tokens=1, cached_tokens=0, pull=pull
    )


def pulling(source: str, blocks: int, *, patience_s: float = 2.0) -> PullPlan:
    return PullPlan(_pool(source), 0, blocks, patience_s)


def ids_of(events: Sequence[Event]) -> list[int]:
    """Of an answer that ended well."""
    assert isinstance(events[-1], Done), events[-1]
    return [token for event in events for token in getattr(event, "token_ids", ())]


def cached_of(events: Sequence[Event]) -> int:
    last = events[-1]
    assert isinstance(last, Done)
    return last.usage.cached_tokens
