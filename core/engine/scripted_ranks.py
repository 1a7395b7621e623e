"""Scripted ranks of a plan: each has its own slabs of every block, the leader of a pool says what
to compute, and all must come to the same tokens.

They meet in two steps: every rank comes to rank 0, which tells all where the leaders of the pools
listen; then each pool is a star of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import msgspec

from core.engine.crew import Address, Peer, dial, gather, listen, own_address
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, RowResult, StepPlan, StepResult, Work
from core.engine.scripted import ScriptedRunner
from core.errors import ConfigError, NodeLost

_encode = msgspec.msgpack.encode
_no_address: Address = ("", 0)


class ScriptedLeader:
    """A `core.engine.plan.Runner` that computes together with its followers."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self._own = ScriptedRunner(config)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._followers: list[Peer] = []

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Returns when the followers are there. Raises NodeLost when they do not come."""
        config = self._config
        loaded = self._own.load(progress)
        progress("ranks", 0.0)
        members = config.plan.members(config.plan.place(config.rank).dp_rank)
        where = own_address((config.master_addr, config.master_port))
        with listen(where) as listener:
            _meet(config, (where, listener.getsockname()[1]))
            followers = gather(config.master_secret, listener, set(members) - {config.rank})
        self._followers = list(followers.values())
        progress("ranks", 1.0)
        return loaded

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._worker.submit(self._step, plan)

    def work(self) -> Work:
        """A rank alone sends nothing."""
        return Work()

    def close(self) -> None:
        for peer in self._followers:
            peer.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._own.close()

    def _step(self, plan: StepPlan) -> StepResult:
        for peer in self._followers:
            peer.say(_encode(plan))
        own = self._own.submit(plan).result()
        rows = {row.sequence: row for row in own.rows}
        for peer in self._followers:
            theirs = msgspec.msgpack.decode(peer.hear(), type=StepResult)
            for row in theirs.rows:
                rows[row.sequence] = _agreed(rows[row.sequence], row, peer.rank)
        return StepResult(own.number, tuple(rows.values()), own.seconds)


class ScriptedFollower:
    """The others of a pool: `load` as a runner does, then `compute` until the leader goes."""

    def __init__(self, config: RankConfig) -> None:
        if config.scripted is not None:  # the leader keeps the pace
            script = msgspec.structs.replace(config.scripted, step_s=0.0, prefill_tokens_per_s=0.0)
            config = msgspec.structs.replace(config, scripted=script)
        self._config = config
        self._own = ScriptedRunner(config)
        self._leader: Peer | None = None

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Raises NodeLost when the leader is not there."""
        config = self._config
        loaded = self._own.load(progress)
        progress("ranks", 0.0)
        dp_rank = config.plan.place(config.rank).dp_rank
        where = _meet(config, _no_address)[dp_rank]
        leader = config.plan.leader(dp_rank)
        self._leader = dial(where, leader, config.rank, config.master_secret)
        progress("ranks", 1.0)
        return loaded

    def compute(self) -> None:
        """Raises NodeLost when the leader has gone."""
        if self._leader is None:
            raise ConfigError("a follower was to compute before it had loaded")
        while True:
            plan = msgspec.msgpack.decode(self._leader.hear(), type=StepPlan)
            self._leader.say(_encode(self._own.submit(plan).result()))

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        self._own.close()


def _agreed(one: RowResult, other: RowResult, rank: int) -> RowResult:
    if one.error is not None or (other.error is None and one.token_ids == other.token_ids):
        return one
    why = other.error or f"it played {other.token_ids} where its leader played {one.token_ids}"
    return RowResult(one.sequence, error=f"rank {rank}: {why}")


def _meet(config: RankConfig, own: Address) -> tuple[Address, ...]:
    """Where the leader of each pool listens; `own`: where this one does. Raises NodeLost."""
    if config.rank == 0:
        return _host(config, own)
    place = (config.master_addr, config.master_port)
    with closing(dial(place, 0, config.rank, config.master_secret)) as first:
        first.say(_encode(own))
        return msgspec.msgpack.decode(first.hear(), type=tuple[Address, ...])


def _host(config: RankConfig, own: Address) -> tuple[Address, ...]:
    """Rank 0: hear of everybody, and tell all where the leaders are."""
    plan = config.plan
    with _listener(config) as listener:
        peers = gather(config.master_secret, listener, range(1, plan.ranks))
    said = {rank: msgspec.msgpack.decode(peer.hear(), type=Address) for rank, peer in peers.items()}
    leaders = tuple(
        own if dp_rank == 0 else said[plan.leader(dp_rank)] for dp_rank in range(plan.dp_attention)
    )
    for peer in peers.values():
        peer.say(_encode(leaders))
        peer.close()
    return leaders


def _listener(config: RankConfig) -> socket.socket:
    """Raises NodeLost when rank 0 cannot listen where the others look for it."""
    if config.master_fd >= 0:
        return socket.socket(fileno=config.master_fd)
    try:
        return socket.create_server((config.master_addr, config.master_port))
    except OSError as error:
        raise NodeLost(f"{config.master_addr}:{config.master_port} is taken: {error}") from error
