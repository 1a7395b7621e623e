"""The ranks of a pool as one runner: the leader says each plan to its followers and computes its
own part; a follower computes what it hears. Results come from the leader itself or, with several
stages, from the last one.

A leader hands a step to its own thread and to the sockets at once, so several steps can be
under way, one in each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import msgspec

from core.engine.lead import NOTHING, Counts, Lead
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, StepPlan, StepResult, Work
from core.engine.plan_wire import decode_plan, decode_result, encode_plan, encode_result
from core.engine.split_rank import SplitRank
from core.engine.stepper import measure
from core.parallel import Place


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Follower → leader after each step; the result, as `plan_wire` writes it, comes from one rank
    of the last stage."""

    counts: Counts
    result: bytes | None = None


_decode_answer = msgspec.msgpack.Decoder(Answer).decode


class LeadingRunner:
    """A `core.engine.plan.Runner`. Once a rank has gone every step fails with NodeLost."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._rank = SplitRank(config)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._lead: Lead | None = None

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Returns when all ranks of the pool have loaded, and computed a few steps together."""
        loaded = self._worker.submit(self._rank.load, progress).result()
        self._lead = lead = Lead(
            self._config,
            self._rank.company,
            awaited={giver(self._config)},
            begin=self._begin,
            heard=self._heard,
        )
        lead.start()
        progress("measuring", 0.0)
        prefill, decode = measure(
            lambda plan: lead.submit(plan).result(), loaded.geometry, self._config.max_step_tokens
        )
        progress("measuring", 1.0)
        lead.forget()
        return replace(loaded, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._leading.submit(plan)

    def work(self) -> Work:
        return self._leading.work()

    def close(self) -> None:
        """A step that waits for another rank is left to itself: the process ends."""
        self._rank.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    @property
    def _leading(self) -> Lead:
        if self._lead is None:
            raise RuntimeError("a step before the rank has loaded")
        return self._lead

    def _begin(self, plan: StepPlan) -> None:
        alone = self._config.plan.stage_ranks == 1
        if alone:  # on its stage: the next one has time until something comes to it
            self._worker.submit(self._compute, plan)
        self._leading.say(encode_plan(plan))
        if not alone:
            self._worker.submit(self._compute, plan)

    def _compute(self, plan: StepPlan) -> None:
        lead = self._leading
        try:
            result = self._rank.stepper.step(plan)
        except BaseException as error:  # noqa: BLE001 — whoever waits for the step is to know
            lead.lose(error)
            return
        lead.note(self._config.rank, counts_of(self._rank))
        self._finish(self._config.rank, result)
        lead.computed()

    def _heard(self, rank: int, message: bytes) -> None:
        answer = _decode_answer(message)
        self._leading.note(rank, answer.counts)
        if answer.result is not None:
            self._finish(rank, decode_result(answer.result))

    def _finish(self, rank: int, result: StepResult | None) -> None:
        if result is not None and result.number != NOTHING.number:
            self._leading.landed(rank, result)


def giver(config: RankConfig) -> int:
    """The rank whose results a pool's leader takes: the first of its last stage."""
    plan = config.plan
    return plan.rank(Place(plan.pp - 1, plan.place(config.rank).dp_rank, 0))


class FollowingRank:
    """A `core.engine.rank.Follower`."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._rank = SplitRank(config)

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        return self._rank.load(progress)

    def compute(self) -> None:
        """Raises NodeLost when the leader or another rank has gone."""
        (leader,) = self._rank.company.peers.values()
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
