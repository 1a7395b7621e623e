"""What every leader of a pool does, whatever it computes on: keeps the steps that are under way, in
order, steps together with other pools where experts are shared, and hears its followers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import msgspec

from core.engine.messages import RankConfig
from core.engine.pace import Pace, PaceKeeper, PaceMaker
from core.engine.plan import StepPlan, StepResult, Work
from core.engine.split_rank import Company
from core.errors import InternalError, NodeLost

NOTHING = StepPlan(-1, ())
"""What a pool computes in a step that others called for; nobody waits for its result."""


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Of one rank, since it began."""

    busy_s: float = 0.0
    sent_bytes: int = 0
    least_bytes: int = 0

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.busy_s - before.busy_s,
            self.sent_bytes - before.sent_bytes,
            self.least_bytes - before.least_bytes,
        )


@dataclass(slots=True)
class _Step:
    begun: float
    missing: set[int]
    """Ranks that have not come to its end."""
    result: StepResult | None = None
    future: Future[StepResult] = field(default_factory=Future)


class Lead:
    """Once a rank has gone every step fails with NodeLost. Any thread may call any method.

    `begin` is called for each step, in order: it says the step to followers and computes this
    rank's own part. `heard` takes what a follower says, on a thread of that follower; it may raise
    MsgspecError. A step has ended when the ranks `awaited` have `landed` it.
    """

    def __init__(
        self,
        config: RankConfig,
        company: Company,
        *,
        awaited: Collection[int],
        begin: Callable[[StepPlan], None],
        heard: Callable[[int, bytes], None],
    ) -> None:
        self._config = config
        self._company = company
        self._awaited = frozenset(awaited)
        self._begin = begin
        self._heard = heard
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque()
        self._uncalled: deque[StepPlan] = deque()
        self._counts: dict[int, Counts] = {}
        self._before: dict[int, Counts] = {}
        self._active_s = 0.0
        self._active_since = 0.0
        self._lost: BaseException | None = None
        self._pace: Pace | None = None

    def start(self) -> None:
        """From here on `begin` and `heard` are called."""
        for rank in self._company.peers:
            name = f"hear-{rank}"
            threading.Thread(target=self._hear, args=(rank,), name=name, daemon=True).start()
        leaders = self._company.leaders
        if not leaders:
            return
        with self._lock:  # which the first call waits for
            if self._config.rank == 0:
                self._pace = PaceMaker(leaders, self._called, self.lose)
            else:
                (maker,) = leaders.values()
                self._pace = PaceKeeper(maker, self._called, self.lose)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        step = _Step(time.perf_counter(), set(self._awaited))
        with self._lock:
            if self._lost is not None:
                step.future.set_exception(self._lost)
                return step.future
            if not self._steps:
                self._active_since = step.begun
            self._steps.append(step)
            if self._pace is not None:
                self._uncalled.append(plan)
        try:
            if self._pace is not None:
                self._pace.want()
            else:
                self._begin(plan)
        except NodeLost as error:
            self.lose(error)
        return step.future

    def say(self, order: bytes) -> None:
        """To all followers. Raises NodeLost."""
        for peer in self._company.peers.values():
            peer.say(order)

    def computed(self) -> None:
        """This rank has done its own part of a step, as far as others wait for it."""
        if self._pace is not None:
            self._pace.done()

    def note(self, rank: int, counts: Counts) -> None:
        with self._lock:
            self._counts[rank] = counts

    def landed(self, rank: int, result: StepResult | None) -> None:
        """`rank` has come to the end of its oldest step; `result` where it knows one."""
        now = time.perf_counter()
        with self._lock:
            step = next((one for one in self._steps if rank in one.missing), None)
            if step is None:
                return  # of a step that has failed meanwhile
            step.missing.remove(rank)
            step.result = result or step.result
            if step.missing:
                return
            self._steps.popleft()  # ranks come to all ends in order
            if not self._steps:
                self._active_s += now - self._active_since
        if step.result is None:
            self.lose(InternalError("a step has ended without a result"))
            return
        if self._config.plan.pp > 1:
            step.result = replace(step.result, seconds=now - step.begun)
        step.future.set_result(step.result)

    def lose(self, error: BaseException) -> None:
        with self._lock:
            self._lost = self._lost or error
            failed, self._steps = list(self._steps), deque()
        for step in failed:
            step.future.set_exception(error)

    def forget(self) -> None:
        """What was done so far does not count as `work`."""
        with self._lock:
            self._before = dict(self._counts)
            self._active_s = 0.0

    def work(self) -> Work:
        """Raises whatever has ended the node."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            counts = {
                rank: count.since(self._before.get(rank, Counts()))
                for rank, count in self._counts.items()
            }
            active_s = self._active_s
        plan = self._config.plan
        stages = [0.0] * plan.pp
        for rank, count in counts.items():
            stage = plan.place(rank).stage
            stages[stage] = max(stages[stage], count.busy_s)
        return Work(
            sent_bytes=sum(count.sent_bytes for count in counts.values()),
            least_bytes=sum(count.least_bytes for count in counts.values()),
            stage_seconds=tuple(stages),
            bubble=max(0.0, 1 - sum(stages) / plan.pp / active_s) if active_s else 0.0,
        )

    def _called(self) -> None:
        """All pools begin a step. Raises NodeLost."""
        with self._lock:
            plan = self._uncalled.popleft() if self._uncalled else NOTHING
        self._begin(plan)

    def _hear(self, rank: int) -> None:
        """On a thread for each follower."""
        peer = self._company.peers[rank]
        try:
            while True:
                self._heard(rank, peer.hear())
        except NodeLost as error:
            self.lose(error)
        except msgspec.MsgspecError as error:
            self.lose(InternalError(f"rank {rank} said something that is no answer: {error}"))
