"""A rank of a plan comes up: it meets the others, reads its part of the weights and makes its pool.

What all ranks must agree on and only one can know (where a leader listens, which layers a stage
has) is said through the store at which they meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from core.engine.crew import Peer, dial, gather, listen
from core.engine.grammar import Masks
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel
from core.engine.process_groups import Beside, Groups, Meeting, make_groups
from core.engine.runner_torch import compute_dtype, use_large_pages
from core.engine.shard_stepper import ShardStepper
from core.engine.stage_costs import measured_stages
from core.engine.stepper import kv_geometry, kv_heads
from core.errors import ConfigError
from core.kv import memory
from core.kv.geometry import KVGeometry
from core.models.config import ModelConfig
from core.models.parallel import Shard, check, shard
from core.models.shard import local_config
from core.models.stage import build_stage
from core.models.weights import WeightSource, fingerprint, open_weights
from core.parallel import Plan
from kernels.ops import Ops, select

Progress = Callable[[str, float], None]


def leads(config: RankConfig) -> bool:
    """Does it schedule its pool?"""
    plan, rank = config.plan, config.rank
    return plan.leader(plan.place(rank).dp_rank) == rank


@dataclass(slots=True)
class Company:
    """The ranks that compute with this one. `peers` by rank: a leader's followers, a follower's
    leader. A leader whose pool keeps step with others has `leaders`: the first one all others, and
    those the first one. `meeting` is None for a rank alone."""

    groups: Groups = field(default_factory=Groups)
    peers: dict[int, Peer] = field(default_factory=dict)
    leaders: dict[int, Peer] = field(default_factory=dict)
    meeting: Meeting | None = None

    def close(self) -> None:
        """From any thread. Whoever waits for a peer is told that it has gone."""
        for peer in (*self.peers.values(), *self.leaders.values()):
            peer.close()
        self.groups.close()

    def stages(self, plan: Plan, measure: Callable[[], list[range]]) -> list[range] | None:
        """The layers of each stage, measured by rank 0, so that all ranks cut at the same."""
        if plan.pp == 1 or self.meeting is None:
            return None
        if self.meeting.first:
            self.meeting.tell("stages", [(run.start, run.stop) for run in measure()])
        edges = self.meeting.hear("stages", list[tuple[int, int]])
        return [range(first, last) for first, last in edges]


def meet(config: RankConfig, beside: Beside | None = None) -> Company:
    """Come together with the other ranks of `config.plan`. Raises NodeLost when they do not."""
    plan = config.plan
    if plan.ranks == 1:
        return Company()
    meeting = Meeting(config)
    company = Company(peers=_star(config, meeting), meeting=meeting)
    try:
        if leads(config) and plan.ep > 1 and plan.tp % plan.ep:
            company.leaders = _leaders(config, meeting)
        company.groups = make_groups(config, meeting, beside)
    except BaseException:
        company.close()
        raise
    return company


def shard_geometry(model: ModelConfig, dtype: torch.dtype, blocks: int, own: Shard) -> KVGeometry:
    """Of a rank that keeps `own` of `model`."""
    name = str(dtype).removeprefix("torch.")
    heads = kv_heads(model, own.kv_heads)
    return kv_geometry(model, name, blocks, layers=own.layers, heads=heads)


def loaded_model(
    source: WeightSource, dtype: torch.dtype, geometry: KVGeometry, descriptor: int
) -> LoadedModel:
    """Without rates."""
    return LoadedModel(
        fingerprint=fingerprint(source, str(dtype).removeprefix("torch.")),
        context=source.config.context,
        vocab_size=source.config.vocab_size,
        geometry=geometry,
        memory_fd=descriptor,
        prefill_tokens_per_s=0.0,
        decode_tokens_per_s=0.0,
    )


class SplitRank:
    """Once it has loaded there are `stepper` and `company`."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.company = Company()
        self._stepper: ShardStepper | None = None
        self._masks: Masks | None = None
        self._descriptor: int | None = None

    @property
    def stepper(self) -> ShardStepper:
        if self._stepper is None:
            raise RuntimeError("a step before the rank has loaded")
        return self._stepper

    def load(self, progress: Progress) -> LoadedModel:
        """Without rates. Raises ConfigError, and NodeLost when the others do not come."""
        config = self.config
        if config.device not in ("auto", "cpu"):
            raise ConfigError(f"device {config.device!r} is not supported; known: auto, cpu, cuda")
        torch.set_num_threads(config.threads)
        source = open_weights(Path(config.source), config.context)
        try:
            check(config.plan, source.config)
            progress("ranks", 0.0)
            self.company = meet(config)
            progress("ranks", 1.0)
            return self._read(source, progress)
        finally:
            source.close()

    def close(self) -> None:
        """From any thread. A step that waits for a peer fails."""
        self.company.close()
        if self._masks is not None:
            self._masks.close()
            self._masks = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self, source: WeightSource, progress: Progress) -> LoadedModel:
        config, model, groups = self.config, source.config, self.company.groups
        dtype = compute_dtype(config.dtype)
        ops = _ops(config, model, dtype)
        stages = self.company.stages(config.plan, lambda: measured_stages(config.plan, source, ops))
        own = shard(config.plan, config.rank, model, stages)
        progress("weights", 0.0)
        stage = build_stage(
            source,
            own,
            ops=ops,
            tensor=groups.tensor,
            experts=groups.experts,
            progress=partial(progress, "weights"),
        )
        geometry = shard_geometry(model, dtype, config.kv_blocks, own)
        self._descriptor, shared = memory.allocate(geometry.pool_bytes)
        use_large_pages(shared)
        if own.predicts:
            self._masks = Masks.of(Path(config.source), model.vocab_size, config.max_sequences)
        self._stepper = ShardStepper(stage, config.plan, geometry, shared, groups, self._masks)
        progress("weights", 1.0)
        return loaded_model(source, dtype, geometry, self._descriptor)


def _star(config: RankConfig, meeting: Meeting) -> dict[int, Peer]:
    plan, rank = config.plan, config.rank
    dp_rank = plan.place(rank).dp_rank
    name = f"leader/{dp_rank}"
    others: Collection[int] = set(plan.members(dp_rank)) - {rank}
    if leads(config):
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
