"""What this node does for others: prompts that it reads, cached KV that it sends. Each is a task;
here is who may end it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from core.engine.lending_messages import Held
from core.engine.messages import (
    PrefillProgress,
)
from core.engine.plan import SequenceId
from core.errors import InternalError, RequestError
from regional.node import wire
from regional.node.notes import ROUTER_LOST, Notes, aborted
from regional.node.seams import Outbox
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.node")


class Job(Protocol):
    """One errand of one attempt. `ended_by`: the error to report when it is ended from outside."""

    attempt_id: str
    sequence: SequenceId
    ended_by: RequestError | None
    sent_bytes: int
    notes: Notes

    @property
    def facts(self) -> dict[str, int]:
        """Tokens and bytes so far, as its line has them."""
        ...

    @property
    def outbox(self) -> Outbox: ...

    @property
    def namespace(self) -> str:
        """Whose prompt it is about."""
        ...

    def stage(self, error: RequestError) -> str:
        """Where `error` happened, as pb.Failed says it."""
        ...

    def tell(self, news: PrefillProgress | Held | RequestError) -> None:
        """What the rank says about `sequence`."""
        ...

    async def run(self, deadline_s: float) -> pb.NodeMessage:
        """To its end; what to report. Raises RequestError. Nothing is left of it in the rank."""
        ...


class Errands:
    """`ended` is called after each errand, when nothing of it is left."""

    def __init__(self, tasks: asyncio.TaskGroup, ended: Callable[[], None]) -> None:
        self.sent_bytes = 0
        self._tasks = tasks
        self._ended = ended
        self._running: dict[SequenceId, tuple[Job, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, job: Job, deadline_s: float) -> None:
        if job.sequence in self._running:
            log.warning("errand %s was sent twice; the second is ignored", job.sequence)
            return
        task = self._tasks.create_task(self._run(job, deadline_s), name=f"errand-{job.sequence}")
        self._running[job.sequence] = job, task
        task.add_done_callback(lambda _: self._over(job))

    def tell(self, sequence: SequenceId, news: PrefillProgress | Held | RequestError) -> None:
        """What the rank says about a sequence, if it is one of ours."""
        if sequence in self._running:
            self._running[sequence][0].tell(news)

    def abort(self, attempt_id: str, reason: str) -> None:
        """End the errands of an attempt and tell its router nothing."""
        self._end(lambda job: job.attempt_id == attempt_id, None, aborted(reason))

    def session_closed(self, outbox: Outbox) -> None:
        self._end(lambda job: job.outbox is outbox, None, ROUTER_LOST)

    def fail_all(self, error: RequestError) -> None:
        self._end(lambda job: True, error, error.code)

    def end_namespace(self, namespace: str, error: RequestError) -> int:
        """End what is done for a namespace: how much that was."""
        return self._end(lambda job: job.namespace == namespace, error, error.code)

    def _end(self, which: Callable[[Job], bool], error: RequestError | None, outcome: str) -> int:
        ended = [(job, task) for job, task in self._running.values() if which(job)]
        for job, task in ended:
            if not task.cancelling():  # a second time would disturb the cleaning up
                job.ended_by, job.notes.outcome = error, outcome
                task.cancel()
        return len(ended)

    async def _run(self, job: Job, deadline_s: float) -> None:
        try:
            done = await job.run(deadline_s)
        except RequestError as error:
            self._report(job, error)
        except Exception:
            # A fault in one errand must not end the node.
            log.exception("errand %s: a fault of ours", job.sequence)
            self._report(job, InternalError("the errand failed on its node"))
        else:
            job.notes.outcome = "ok"
            job.outbox.send(done)

    def _over(self, job: Job) -> None:
        """Also for a task that was cancelled before it began."""
        _, task = self._running.pop(job.sequence)
        self.sent_bytes += job.sent_bytes
        if task.cancelled() and job.ended_by is not None:
            self._report(job, job.ended_by)
        job.notes.close(job.facts)
        self._ended()

    def _report(self, job: Job, error: RequestError) -> None:
        job.notes.outcome = error.code
        job.outbox.send(wire.failed(job.attempt_id, job.stage(error), error))
