"""A rank of a plan comes up: it meets the others, reads its part of the weights and makes its pool.

What all ranks must agree on and only one can know (where a leader listens, which layers a stage
has) is said through the store at which they meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch

from core.engine.crew import Peer, dial, gather, listen
from core.engine.grammar import Masks
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel
from core.engine.process_groups import Groups, Meeting, make_groups
from core.engine.runner_torch import compute_dtype, use_large_pages
from core.engine.shard_stepper import ShardStepper
from core.engine.stage_costs import measured_stages
from core.engine.stepper import kv_geometry, kv_heads
from core.errors import ConfigError
from core.kv import memory
from core.models.config import ModelConfig
from core.models.parallel import check, shard
from core.models.shard import local_config
from core.models.stage import build_stage
from core.models.weights import WeightSource, fingerprint, open_weights
from kernels.ops import Ops, select

Progress = Callable[[str, float], None]


class SplitRank:
    """Once it has loaded there are `stepper` and, by rank, `peers`: a leader's followers, a
    follower's leader. A leader whose pool keeps step with others has `leaders`: the first one all
    others, and those the first one."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.peers: dict[int, Peer] = {}
        self.leaders: dict[int, Peer] = {}
        self._groups = Groups()
        self._stepper: ShardStepper | None = None
        self._masks: Masks | None = None
        self._descriptor: int | None = None

    @property
    def leads(self) -> bool:
        plan, rank = self.config.plan, self.config.rank
        return plan.leader(plan.place(rank).dp_rank) == rank

    @property
    def stepper(self) -> ShardStepper:
        if self._stepper is None:
            raise RuntimeError("a step before the rank has loaded")
        return self._stepper

    def load(self, progress: Progress) -> LoadedModel:
        """Without rates. Raises ConfigError, and NodeLost when the others do not come."""
        config = self.config
        if config.device not in ("auto", "cpu"):
            raise ConfigError(
                f"device {config.device!r} is not supported on several ranks; known: auto, cpu"
            )
        torch.set_num_threads(config.threads)
        source = open_weights(Path(config.source), config.context)
        try:
            model = source.config
            check(config.plan, model)
            progress("ranks", 0.0)
            meeting = Meeting(config)
            self.peers = _star(config, meeting, leads=self.leads)
            if self.leads and config.plan.ep > 1 and config.plan.tp % config.plan.ep:
                self.leaders = _leaders(config, meeting)
            self._groups = make_groups(config, meeting)
            progress("ranks", 1.0)
            return self._read(source, meeting, self._groups, progress)
        finally:
            source.close()

    def close(self) -> None:
        """From any thread. A step that waits for a peer fails."""
        for peer in (*self.peers.values(), *self.leaders.values()):
            peer.close()
        self._groups.close()
        if self._masks is not None:
            self._masks.close()
            self._masks = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(
        self, source: WeightSource, meeting: Meeting, groups: Groups, progress: Progress
    ) -> LoadedModel:
        config, model = self.config, source.config
        dtype = compute_dtype(config.dtype)
        ops = _ops(config, model, dtype)
        own = shard(config.plan, config.rank, model, _stages(config, meeting, source, ops))
        progress("weights", 0.0)
        stage = build_stage(
            source,
            own,
            ops=ops,
            tensor=groups.tensor,
            experts=groups.experts,
            progress=partial(progress, "weights"),
        )
        name = str(dtype).removeprefix("torch.")
        geometry = kv_geometry(
            model, name, config.kv_blocks, layers=own.layers, heads=kv_heads(model, own.kv_heads)
        )
        self._descriptor, shared = memory.allocate(geometry.pool_bytes)
        use_large_pages(shared)
        if own.predicts:
            self._masks = Masks.of(Path(config.source), model.vocab_size, config.max_sequences)
        self._stepper = ShardStepper(stage, config.plan, geometry, shared, groups, self._masks)
        progress("weights", 1.0)
        return LoadedModel(
            fingerprint=fingerprint(source, name),
            context=model.context,
            vocab_size=model.vocab_size,
            geometry=geometry,
            memory_fd=self._descriptor,
            prefill_tokens_per_s=0.0,
            decode_tokens_per_s=0.0,
        )


def _star(config: RankConfig, meeting: Meeting, *, leads: bool) -> dict[int, Peer]:
    plan, rank = config.plan, config.rank
    dp_rank = plan.place(rank).dp_rank
    name = f"leader/{dp_rank}"
    others: Collection[int] = set(plan.members(dp_rank)) - {rank}
    if leads:
        with listen(meeting.address) as listener:
            meeting.tell(name, (meeting.address, listener.getsockname()[1]))
            return gather(config.master_secret, listener, others)
    leader = plan.leader(dp_rank)
    where = meeting.hear(name, tuple[str, int])
    return {leader: dial(where, leader, rank, config.master_secret)}


def _leaders(config: RankConfig, meeting: Meeting) -> dict[int, Peer]:
    """Of pools whose experts are spread over ranks of several pools: a star around the first."""
    plan, rank = config.plan, config.rank
    others = [plan.leader(dp_rank) for dp_rank in range(plan.dp_attention)]
    others.remove(rank)
    if rank == 0:
        with listen(meeting.address) as listener:
            meeting.tell("pace", (meeting.address, listener.getsockname()[1]))
            return gather(config.master_secret, listener, others)
    where = meeting.hear("pace", tuple[str, int])
    return {0: dial(where, 0, rank, config.master_secret)}


def _stages(
    config: RankConfig, meeting: Meeting, source: WeightSource, ops: Ops
) -> list[range] | None:
    """Measured by rank 0, so that all ranks cut at the same layers."""
    if config.plan.pp == 1:
        return None
    if config.rank == 0:
        runs = measured_stages(config.plan, source, ops)
        meeting.tell("stages", [(run.start, run.stop) for run in runs])
    edges = meeting.hear("stages", list[tuple[int, int]])
    return [range(first, last) for first, last in edges]


def _ops(config: RankConfig, model: ModelConfig, dtype: torch.dtype) -> Ops:
    """The same kind on all ranks: their activations meet."""
    plan = config.plan
    columns = {
        count
        for tp_rank in range(plan.tp)
        for count in local_config(model, shard(plan, tp_rank, model)).columns
    }
    return select(
        "cpu",
        dtype,
        native=config.native,
        threads=config.threads,
        columns=sorted(columns),
    )
