"""The ranks of a pool as one runner: the leader says each plan to its followers and computes its
own part; a follower computes what it hears. Results come from the leader itself or, with several
stages, from the last one.

A leader hands a step to its own thread and to the sockets at once, so several steps can be
under way, one in each stage.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from core.engine.messages import RankConfig
from core.engine.pace import Pace, PaceKeeper, PaceMaker
from core.engine.plan import LoadedModel, StepPlan, StepResult, Work
from core.engine.plan_wire import decode_plan, decode_result, encode_plan, encode_result
from core.engine.split_rank import SplitRank
from core.engine.stepper import measure
from core.errors import InternalError, NodeLost

_NOTHING = StepPlan(-1, ())
"""What a pool computes in a step that others called for."""


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


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Follower → leader after each step; the result, as `plan_wire` writes it, comes from one rank
    of the last stage."""

    counts: Counts
    result: bytes | None = None


@dataclass(slots=True)
class _Waiting:
    future: Future[StepResult]
    begun: float


class LeadingRunner:
    """A `core.engine.plan.Runner`. Once a rank has gone every step fails with NodeLost."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._rank = SplitRank(config)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._pace: Pace | None = None
        self._uncalled: deque[StepPlan] = deque()
        self._counts: dict[int, Counts] = {}
        self._before: dict[int, Counts] = {}
        self._active_s = 0.0
        self._active_since = 0.0
        self._lost: BaseException | None = None

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Returns when all ranks of the pool have loaded, and computed a few steps together."""
        loaded = self._worker.submit(self._rank.load, progress).result()
        for rank in self._rank.peers:
            name = f"hear-{rank}"
            threading.Thread(target=self._hear, args=(rank,), name=name, daemon=True).start()
        self._pace = self._paced()
        progress("measuring", 0.0)
        prefill, decode = measure(
            lambda plan: self.submit(plan).result(), loaded.geometry, self._config.max_step_tokens
        )
        progress("measuring", 1.0)
        with self._lock:
            self._before = dict(self._counts)
            self._active_s = 0.0
        return replace(loaded, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        waiting = _Waiting(Future(), time.perf_counter())
        with self._lock:
            if self._lost is not None:
                waiting.future.set_exception(self._lost)
                return waiting.future
            if not self._waiting:
                self._active_since = waiting.begun
            self._waiting.append(waiting)
            if self._pace is not None:
                self._uncalled.append(plan)
        try:
            if self._pace is not None:
                self._pace.want()
            else:
                self._begin(plan)
        except NodeLost as error:
            self._lose(error)
        return waiting.future

    def work(self) -> Work:
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

    def close(self) -> None:
        """A step that waits for another rank is left to itself: the process ends."""
        self._rank.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------- a step

    def _paced(self) -> Pace | None:
        leaders = self._rank.leaders
        if not leaders:
            return None
        if self._config.rank == 0:
            return PaceMaker(leaders, self._called, self._lose)
        (maker,) = leaders.values()
        return PaceKeeper(maker, self._called, self._lose)

    def _called(self) -> None:
        """All pools begin a step. Raises NodeLost."""
        with self._lock:
            plan = self._uncalled.popleft() if self._uncalled else _NOTHING
        self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        said = encode_plan(plan)
        for peer in self._rank.peers.values():
            peer.say(said)
        self._worker.submit(self._compute, plan)

    def _compute(self, plan: StepPlan) -> None:
        try:
            result = self._rank.stepper.step(plan)
        except BaseException as error:  # noqa: BLE001 — whoever waits for the step is to know
            self._lose(error)
            return
        self._note(self._config.rank, counts_of(self._rank))
        if result is not None:
            self._finish(result)
        if self._pace is not None:
            self._pace.done()

    def _hear(self, rank: int) -> None:
        """On a thread for each follower."""
        decode = msgspec.msgpack.Decoder(Answer).decode
        peer = self._rank.peers[rank]
        try:
            while True:
                answer = decode(peer.hear())
                self._note(rank, answer.counts)
                if answer.result is not None:
                    self._finish(decode_result(answer.result))
        except NodeLost as error:
            self._lose(error)
        except msgspec.MsgspecError as error:
            self._lose(InternalError(f"rank {rank} said something that is no answer: {error}"))

    def _note(self, rank: int, counts: Counts) -> None:
        with self._lock:
            self._counts[rank] = counts

    def _finish(self, result: StepResult) -> None:
        """Results come in the order of plans."""
        if result.number == _NOTHING.number:
            return
        now = time.perf_counter()
        with self._lock:
            if not self._waiting:
                return  # of a step that has failed meanwhile
            waiting = self._waiting.popleft()
            if not self._waiting:
                self._active_s += now - self._active_since
        if self._config.plan.pp > 1:
            result = replace(result, seconds=now - waiting.begun)
        waiting.future.set_result(result)

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            self._lost = self._lost or error
            failed, self._waiting = list(self._waiting), deque()
        for waiting in failed:
            waiting.future.set_exception(error)


class FollowingRank:
    """A `core.engine.rank.Follower`."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._rank = SplitRank(config)

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        return self._rank.load(progress)

    def compute(self) -> None:
        """Raises NodeLost when the leader or another rank has gone."""
        (leader,) = self._rank.peers.values()
        first = self._config.plan.place(self._config.rank).tp_rank == 0
        while True:
            result = self._rank.stepper.step(decode_plan(leader.hear()))
            told = encode_result(result) if first and result is not None else None
            leader.say(msgspec.msgpack.encode(Answer(counts_of(self._rank), told)))

    def close(self) -> None:
        self._rank.close()


def counts_of(rank: SplitRank) -> Counts:
    stepper = rank.stepper
    return Counts(stepper.busy_s, stepper.sent_bytes, stepper.least_bytes)
