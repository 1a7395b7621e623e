"""The prefills that this node computes for others: one task each, and who may end them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from core.engine.messages import PrefillProgress
from core.engine.plan import SequenceId
from core.errors import InternalError, RequestError, TransferFailed
from regional.node import wire
from regional.node.prefill import Outbox, PrefillJob
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.node")


class Errands:
    """`ended` is called after each errand, when nothing of it is left."""

    def __init__(self, tasks: asyncio.TaskGroup, ended: Callable[[], None]) -> None:
        self.sent_bytes = 0
        self._tasks = tasks
        self._ended = ended
        self._running: dict[SequenceId, tuple[PrefillJob, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, job: PrefillJob, deadline_s: float) -> None:
        if job.sequence in self._running:
            log.warning("prefill %s was sent twice; the second is ignored", job.attempt_id)
            return
        task = self._tasks.create_task(self._run(job, deadline_s), name=f"prefill-{job.attempt_id}")
        self._running[job.sequence] = job, task
        task.add_done_callback(lambda _: self._over(job))

    def tell(self, sequence: SequenceId, news: PrefillProgress | RequestError) -> None:
        """What the rank says about a sequence, if it is one of ours."""
        if sequence in self._running:
            self._running[sequence][0].tell(news)

    def abort(self, attempt_id: str) -> None:
        """End an errand and say nothing about it."""
        self._end(lambda job: job.attempt_id == attempt_id, None)

    def session_closed(self, outbox: Outbox) -> None:
        self._end(lambda job: job.outbox is outbox, None)

    def fail_all(self, error: RequestError) -> None:
        self._end(lambda job: True, error)

    def _end(self, which: Callable[[PrefillJob], bool], error: RequestError | None) -> None:
        for job, task in list(self._running.values()):
            if which(job):
                job.ended_by = error
                task.cancel()

    async def _run(self, job: PrefillJob, deadline_s: float) -> None:
        try:
            done = await job.run(deadline_s)
        except RequestError as error:
            self._report(job, error)
        except Exception:
            # A fault in one errand must not end the node.
            log.exception("prefill %s: a fault of ours", job.attempt_id)
            self._report(job, InternalError("the prefill node failed"))
        else:
            job.outbox.send(pb.NodeMessage(prefill_done=done))

    def _over(self, job: PrefillJob) -> None:
        """Also for a task that was cancelled before it began."""
        _, task = self._running.pop(job.sequence)
        self.sent_bytes += job.sent_bytes
        if task.cancelled() and job.ended_by is not None:
            self._report(job, job.ended_by)
        self._ended()

    def _report(self, job: PrefillJob, error: RequestError) -> None:
        stage = "transfer" if isinstance(error, TransferFailed) else "prefill"
        job.outbox.send(wire.failed(job.attempt_id, stage, error))
