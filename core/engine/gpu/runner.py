"""The runner of a rank on a GPU, and its followers where a plan has several: one thread gives steps
to the device, one waits for them.

The engine may have several steps under way; what it does meanwhile costs the device nothing.
Graphs are captured when nothing has been under way for a while: the leader says when and which, so
that all ranks capture in the same order, and uses one once all of them have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition

from core.engine.gpu.graphs import GraphSizes
from core.engine.gpu.orders import (
    Arrive,
    Capture,
    Captured,
    Compute,
    Landed,
    Order,
    decode_answer,
    decode_order,
    encode,
)
from core.engine.gpu.rank import DeviceRank, Kit
from core.engine.gpu.stepper import Launched
from core.engine.lead import NOTHING, Lead
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, StepPlan, StepResult, Work
from core.engine.plan_wire import decode_plan, decode_result, encode_plan, encode_result
from core.engine.runner_split import giver
from core.engine.stepper import measure
from core.errors import NodeLost

IDLE_S = 0.05
"""Without a step for so long, the device counts as idle: an engine that waits for each step before
it makes the next one leaves gaps that are none."""

Progress = Callable[[str, float], None]


@dataclass(slots=True)
class _Capturing:
    """A graph on its way: `missing` are the ranks that have not said whether they have it."""

    size: int
    missing: set[int]
    good: bool = True


class DeviceRunner:
    """A `core.engine.plan.Runner` that `Mirrors`: alone, or the leader of a pool."""

    def __init__(self, config: RankConfig, kit: Kit) -> None:
        self._config = config
        self._rank = DeviceRank(config, kit)
        self._giving = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._landing = ThreadPoolExecutor(1, thread_name_prefix="landing")
        self._lead: Lead | None = None
        self._under_way = 0
        self._changing = Condition()
        self._sizes = GraphSizes(config.max_sequences)
        self._capturing: _Capturing | None = None

    def load(self, progress: Progress) -> LoadedModel:
        """Returns when all ranks of the pool have loaded, and computed a few steps together."""
        loaded = self._giving.submit(self._rank.load, progress).result()
        config, company = self._config, self._rank.company
        # A block may be sent when every rank has its part of it on the host.
        awaited = {config.rank, *company.peers}
        self._lead = lead = Lead(
            config, company, awaited=awaited, begin=self._begin, heard=self._heard
        )
        lead.start()
        progress("measuring", 0.0)
        prefill, decode = measure(
            lambda plan: self.submit(plan).result(), loaded.geometry, config.max_step_tokens
        )
        progress("measuring", 1.0)
        lead.forget()
        return replace(loaded, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        lead = self._leading
        with self._changing:
            self._under_way += 1
            self._changing.notify()
        handle = lead.submit(plan)
        handle.add_done_callback(self._ended)
        return handle

    def arrive(self, groups: Sequence[Sequence[int]]) -> None:
        """Blocks of each KV group have been filled in the shared memory of all ranks; steps that
        are submitted from now on may read them."""
        self._leading  # noqa: B018 — raises before load
        self._giving.submit(self._beside, partial(self._arrive, groups))

    def work(self) -> Work:
        return self._leading.work()

    def close(self) -> None:
        """Alone, waits for what was given to the device; a step that waits for another rank is left
        to itself: the process ends."""
        alone = self._config.plan.ranks == 1
        if not alone:
            self._rank.company.close()
        self._giving.shutdown(wait=alone, cancel_futures=True)
        self._landing.shutdown(wait=alone)
        self._rank.close()

    @property
    def _leading(self) -> Lead:
        if self._lead is None:
            raise RuntimeError("a step before load")
        return self._lead

    # ------------------------------------------------------------------ a step

    def _begin(self, plan: StepPlan) -> None:
        self._giving.submit(self._beside, partial(self._give, plan))

    def _give(self, plan: StepPlan) -> None:
        self._capture(idle=False)
        graph = self._graph(plan)
        self._say(Compute(encode_plan(plan), graph))
        launched = self._rank.stepper.launch(plan, graph)
        self._landing.submit(self._land, launched)
        self._leading.computed()

    def _land(self, launched: Launched) -> None:
        lead, rank = self._leading, self._config.rank
        try:
            result = self._rank.stepper.land(launched)
        except Exception as error:  # noqa: BLE001 — whoever waits for the step is told
            lead.lose(error)
            return
        lead.note(rank, self._rank.counts)
        if launched.plan.number != NOTHING.number:
            lead.landed(rank, result if rank == giver(self._config) else None)

    def _heard(self, rank: int, message: bytes) -> None:
        """On a thread for each follower."""
        match decode_answer(message):
            case Landed(number, counts, result):
                self._leading.note(rank, counts)
                if number != NOTHING.number:
                    told = None if result is None else decode_result(result)
                    self._leading.landed(rank, told)
            case Captured(size, good):
                self._captured(rank, size, good=good)

    def _arrive(self, groups: Sequence[Sequence[int]]) -> None:
        self._say(Arrive(tuple(tuple(group) for group in groups)))
        self._rank.stepper.arrive(groups)

    def _say(self, order: Order) -> None:
        if self._rank.company.peers:
            self._leading.say(encode(order))

    def _beside(self, what: Callable[[], None]) -> None:
        """On the thread that gives: what goes wrong there ends the steps, also those to come."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 — whoever waits for a step is told
            self._leading.lose(error)

    # ------------------------------------------------------------------ graphs

    def _graph(self, plan: StepPlan) -> int:
        """The size of the one for a step; 0: none."""
        decodes = all(len(row.token_ids) == 1 and row.sample is not None for row in plan.rows)
        if not plan.rows or not decodes or not self._rank.stepper.captures:
            return 0
        with self._changing:
            return self._sizes.use(len(plan.rows)) or 0

    def _ended(self, handle: Future[StepResult]) -> None:
        """Of a step, whose handle has what came of it."""
        with self._changing:
            self._under_way -= 1
            idle = self._under_way == 0
        if idle and handle.exception() is None:
            self._idle()

    def _idle(self) -> None:
        def capture() -> None:
            with self._changing:
                busy = self._changing.wait_for(lambda: self._under_way > 0, IDLE_S)
            if not busy:
                self._capture(idle=True)

        try:
            self._giving.submit(self._beside, capture)
        except RuntimeError:  # closed meanwhile: there is nothing to be fast for
            return

    def _capture(self, *, idle: bool) -> None:
        """Begin a graph if one is wanted, on all ranks."""
        if not self._rank.stepper.captures:
            return
        rank = self._config.rank
        with self._changing:
            size = self._sizes.next(idle=idle)
            if size is None or self._capturing is not None:
                return
            self._capturing = _Capturing(size, {rank, *self._rank.company.peers})
        self._say(Capture(size))
        self._captured(rank, size, good=self._rank.stepper.capture(size))

    def _captured(self, rank: int, size: int, *, good: bool) -> None:
        with self._changing:
            capturing = self._capturing
            if capturing is None or capturing.size != size:
                return
            capturing.missing.discard(rank)
            capturing.good = capturing.good and good
            if capturing.missing:
                return
            self._capturing = None
            if capturing.good:
                self._sizes.captured(size)
            else:
                self._sizes.failed(size)
            idle = self._under_way == 0
        if idle:
            self._idle()


class DeviceFollower:
    """A `core.engine.rank.Follower`."""

    def __init__(self, config: RankConfig, kit: Kit) -> None:
        self._config = config
        self._rank = DeviceRank(config, kit)
        self._giving = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._landing = ThreadPoolExecutor(1, thread_name_prefix="landing")
        self._broken: Exception | None = None

    def load(self, progress: Progress) -> LoadedModel:
        return self._giving.submit(self._rank.load, progress).result()

    def compute(self) -> None:
        """Raises NodeLost when the leader or another rank has gone."""
        self._giving.submit(self._follow).result()

    def close(self) -> None:
        self._rank.company.close()
        self._giving.shutdown(wait=False, cancel_futures=True)
        self._landing.shutdown(wait=False)
        self._rank.close()

    def _follow(self) -> None:
        (leader,) = self._rank.company.peers.values()
        stepper = self._rank.stepper
        try:
            while True:
                match decode_order(leader.hear()):
                    case Compute(plan, graph):
                        launched = stepper.launch(decode_plan(plan), graph)
                        self._landing.submit(self._land, launched)
                    case Capture(size):
                        leader.say(encode(Captured(size, stepper.capture(size))))
                    case Arrive(groups):
                        stepper.arrive(groups)
        except NodeLost as error:
            raise self._broken or error from error

    def _land(self, launched: Launched) -> None:
        (leader,) = self._rank.company.peers.values()
        try:
            result = self._rank.stepper.land(launched)
            gives = self._config.rank == giver(self._config)
            told = encode_result(result) if gives else None
            leader.say(encode(Landed(launched.plan.number, self._rank.counts, told)))
        except Exception as error:  # noqa: BLE001 — the thread that hears raises it
            self._broken = self._broken or error
            leader.close()
