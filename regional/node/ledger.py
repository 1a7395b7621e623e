"""What each router has under way on this node, so that every other one can be told.

A router counts what it has sent itself at the moment it sends it; of what others send to the same
node it learns from heartbeats. Both count alike: the figures are those that came with the work.
Kept by watching what goes through the sessions, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regional.pb import node_pb2 as pb


@dataclass(slots=True)
class _Task:
    """One attempt's part on this node."""

    pool: int
    reads: bool
    compute_tokens: int
    sequences: int
    answer_tokens: int


class Ledger:
    """Of a node with `pools` pools. `changed` is called when something began or ended, with the
    account that it belongs to."""

    def __init__(self, pools: int, changed: Callable[[Account], None]) -> None:
        self._pools = pools
        self._accounts: list[Account] = []
        self.changed = changed

    def open(self) -> Account:
        """For a new session; its `close` ends it."""
        account = Account(self)
        self._accounts.append(account)
        return account

    def drop(self, account: Account) -> None:
        self._accounts.remove(account)

    def others(self, account: Account) -> list[pb.PoolWork]:
        """What all accounts but this one have under way, by pool; nothing where there is none."""
        tasks = [
            task for one in self._accounts if one is not account for task in one.tasks.values()
        ]
        if not tasks:
            return []
        works = [pb.PoolWork() for _ in range(self._pools)]
        for task in tasks:
            if task.pool >= self._pools:
                continue  # it was refused for that
            work = works[task.pool]
            work.prefills += task.reads
            work.prefill_tokens += task.compute_tokens if task.reads else 0
            work.sequences += task.sequences
            work.answer_tokens += task.answer_tokens
        return works


class Account:
    """One session's work. Told of every message of it, in both directions."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.tasks: dict[str, _Task] = {}

    def heard(self, message: pb.RouterMessage) -> None:
        match message.WhichOneof("body"):
            case "reserve":
                self._begin(message.reserve.attempt_id, message.reserve.work, message.reserve.pool)
            case "prefill":
                self._begin(message.prefill.attempt_id, message.prefill.work, message.prefill.pool)
            case "start" if message.start.HasField("work"):
                self._begin(message.start.attempt_id, message.start.work, message.start.pool)
            case "abort":
                self._end(message.abort.attempt_id)

    def said(self, message: pb.NodeMessage) -> None:
        match message.WhichOneof("body"):
            case "step_output":
                for output in message.step_output.sequences:
                    self._output(output)
            case "prefill_done":
                self._end(message.prefill_done.attempt_id)
            case "failed" if message.failed.stage != "send":  # which was none of its own work
                self._end(message.failed.attempt_id)
            case "preempted":
                self._end(message.preempted.attempt_id)

    def close(self) -> None:
        """The session is over, and with it all of its work."""
        self.tasks.clear()
        self._ledger.drop(self)
        self._ledger.changed(self)

    def _begin(self, attempt_id: str, work: pb.Work, pool: int) -> None:
        reads = work.compute_tokens > 0
        self.tasks[attempt_id] = _Task(
            pool, reads, work.compute_tokens, work.sequences, work.answer_tokens
        )
        self._ledger.changed(self)

    def _output(self, output: pb.SequenceOutput) -> None:
        task = self.tasks.get(output.attempt_id)
        if task is None:
            return
        if output.last:
            self._end(output.attempt_id)
        elif output.delta:
            task.answer_tokens = max(0, task.answer_tokens - 1)
            if task.reads:
                task.reads = False
                self._ledger.changed(self)

    def _end(self, attempt_id: str) -> None:
        if self.tasks.pop(attempt_id, None) is not None:
            self._ledger.changed(self)
