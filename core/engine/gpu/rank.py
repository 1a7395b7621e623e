"""A rank on a device comes up: alone, or as one of a plan. Kernels are compiled while it reads its
weights, and what its front shares with it is pinned."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from core.engine.gpu.device import Device
from core.engine.gpu.groups import nccl, on_device
from core.engine.gpu.pool import DevicePool
from core.engine.gpu.stepper import DeviceStepper
from core.engine.grammar import Masks
from core.engine.lead import Counts
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel
from core.engine.process_groups import Backend
from core.engine.split_rank import Company, Progress, loaded_model, meet, shard_geometry
from core.engine.stage_costs import Work, measured_stages
from core.errors import ConfigError
from core.kv import memory
from core.kv.geometry import KVGeometry
from core.kv.pool import BlockPool
from core.models.config import ModelConfig
from core.models.decoder import ForwardBatch
from core.models.parallel import check, shard
from core.models.shard import local_config
from core.models.stage import build_stage
from core.models.weights import WeightSource, open_weights
from kernels.draw import Draw, draw_by_sorting
from kernels.ops import Ops, select

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _kernels(where: torch.device, dtype: torch.dtype) -> Ops:
    return select(where.type, dtype)


@dataclass(frozen=True, slots=True)
class Kit:
    """What a rank is put together from. `device` is made on the thread that gives steps to it;
    `rehearse` compiles what a model will use; `backend` gives torch's process group of some
    (members), of which this rank has a place, for tensors on a device; `draw` is for tokens that
    their best candidates do not decide."""

    device: Callable[[], Device]
    rehearse: Callable[[ModelConfig, torch.dtype, torch.device], None]
    ops: Callable[[torch.device, torch.dtype], Ops] = _kernels
    backend: Callable[[Store, int, Sequence[int], torch.device], Backend] = nccl
    draw: Draw = draw_by_sorting


class DeviceBench:
    """A `core.engine.stage_costs.Bench` on a device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def pool(self, geometry: KVGeometry) -> BlockPool:
        return DevicePool(geometry, self._device.where)

    def placed(self, tokens: ForwardBatch) -> ForwardBatch:
        where = self._device.where
        groups = tuple(
            replace(
                group,
                tables=group.tables.to(where),
                slots=group.slots.to(where),
                spans=group.spans.to(where),
            )
            for group in tokens.groups
        )
        return ForwardBatch(
            tokens.tokens.to(where), tokens.positions.to(where), groups, tokens.sampled.to(where)
        )

    def seconds(self, work: Work) -> float:
        began = self._device.mark()
        work()
        ended = self._device.mark()
        ended.wait()
        return ended.since(began)


class DeviceRank:
    """Once it has loaded there are `stepper` and `company`. `load` belongs to the thread that gives
    steps."""

    def __init__(self, config: RankConfig, kit: Kit) -> None:
        self.config = config
        self.company = Company()
        self._kit = kit
        self._stepper: DeviceStepper | None = None
        self._masks: Masks | None = None
        self._descriptor: int | None = None

    @property
    def stepper(self) -> DeviceStepper:
        if self._stepper is None:
            raise RuntimeError("a step before load")
        return self._stepper

    @property
    def counts(self) -> Counts:
        stepper = self.stepper
        return Counts(stepper.busy_s, stepper.sent_bytes, stepper.least_bytes)

    def load(self, progress: Progress) -> LoadedModel:
        """Without rates. Raises ConfigError, and NodeLost when the other ranks do not come."""
        config = self.config
        if config.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ConfigError(f"dtype {config.dtype!r} is not supported; known: {known}")
        dtype = _DTYPES[config.dtype]
        device = self._kit.device()
        source = open_weights(Path(config.source), config.context)
        try:
            check(config.plan, source.config)
            if config.plan.ranks > 1:
                progress("ranks", 0.0)
                make, where = self._kit.backend, device.where
                beside = on_device(lambda store, at, members: make(store, at, members, where))
                self.company = meet(config, beside)
                progress("ranks", 1.0)
            return self._read(source, device, dtype, progress)
        finally:
            source.close()

    def close(self) -> None:
        """From any thread. Whoever waits for a peer is told that it has gone."""
        self.company.close()
        self._stepper = None
        if self._masks is not None:
            self._masks.close()
            self._masks = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(
        self, source: WeightSource, device: Device, dtype: torch.dtype, progress: Progress
    ) -> LoadedModel:
        config, model, groups = self.config, source.config, self.company.groups
        make_ops = partial(self._kit.ops, device.where, dtype)

        def measure() -> list[range]:  # with operations of its own, which keep what they have read
            return measured_stages(config.plan, source, make_ops(), DeviceBench(device))

        stages = self.company.stages(config.plan, measure)
        own = shard(config.plan, config.rank, model, stages)
        geometry = shard_geometry(model, dtype, config.kv_blocks, own)
        progress("weights", 0.0)
        with ThreadPoolExecutor(1, thread_name_prefix="compile") as compiling:
            local = local_config(model, own)
            compiled = compiling.submit(self._kit.rehearse, local, dtype, device.where)
            stage = build_stage(
                source,
                own,
                ops=make_ops(),
                tensor=groups.tensor,
                experts=groups.experts,
                progress=partial(progress, "weights"),
            )
            progress("weights", 1.0)
            progress("kernels", 0.0)
            compiled.result()
        progress("kernels", 1.0)
        self._descriptor, shared = memory.allocate(geometry.pool_bytes)
        device.pin(torch.frombuffer(shared, dtype=torch.uint8))
        if own.predicts:
            self._masks = Masks.of(Path(config.source), model.vocab_size, config.max_sequences)
        self._stepper = DeviceStepper(
            stage,
            geometry,
            shared,
            device,
            most=config.max_sequences,
            context=model.context,
            groups=groups,
            masks=self._masks,
            draw=self._kit.draw,
        )
        return loaded_model(source, dtype, geometry, self._descriptor)
