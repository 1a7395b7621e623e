"""Decoding on a GPU against what its memory allows: part of `make bench-kernels`.

A random Llama of the 1B class in bf16. The bound of a step is the time that its weights, and the KV
of its sequences, take at the card's own copy rate, measured in the same run. Steps follow each
other as the engine gives them: by graphs, without waiting for the host.

Writes build/bench/bench-decode.json. Exit 1 when a floor is missed, 0 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from core.engine.gpu.device import Device
from core.engine.gpu.stepper import DeviceStepper, Launched
from core.engine.pending import MOST_AHEAD
from core.engine.plan import Row, SampleSpec, SequenceId, StepPlan
from core.engine.stepper import kv_geometry
from core.errors import InternalError
from core.models.config import ModelConfig
from core.models.quantised import Encoding, StoredTensor
from core.models.stage import whole_stage
from core.types import BLOCK_TOKENS
from kernels.ops import Ops

COMMAND = "make bench-kernels"
LLAMA_1B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    context=8192,
    norm_eps=1e-5,
    rope_theta=500000.0,
    tied=True,
)
CONTEXT = 1024
STEPS = 100
GOALS = {1: (0.70, 0.50), 64: (0.60, 0.40)}
"""Of each batch size, (target, floor) as shares of the bound."""
_GREEDY = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)


class RandomWeights:
    """A `core.models.weights.WeightSource` of a dense Llama that nobody trained."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = shapes(config)
        self._random = torch.Generator().manual_seed(0)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def read(self, name: str) -> StoredTensor:
        shape = self._shapes[name]
        numbers = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 2:
            numbers.normal_(0, 1 / math.sqrt(shape[1]), generator=self._random)
        return StoredTensor(Encoding.BF16, shape, numbers.view(-1, shape[-1]).view(torch.uint8))

    def digest(self) -> bytes:
        return b"random".ljust(16, b"\0")

    def close(self) -> None:
        """There is no file."""


def shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Of a Llama whose head is its embedding."""
    hidden, wide = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    in_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config.layers):
        found |= {f"model.layers.{layer}.{name}.weight": s for name, s in in_layer.items()}
    return found


def step_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """What a decode step must read in bf16: all weights once, and the KV of its sequences."""
    weights = sum(math.prod(shape) for shape in shapes(config).values())
    heads, dim = config.kv_shape
    return 2 * (weights + batch * context * config.layers * 2 * heads * dim)


@dataclass(frozen=True, slots=True)
class Decoded:
    batch: int
    seconds: float
    """Of a step."""
    nbytes: int

    def share(self, rate: float) -> float:
        """Of the bound at `rate` bytes a second."""
        return self.nbytes / rate / self.seconds


def measure(
    config: ModelConfig,
    ops: Ops,
    device: Device,
    batches: Sequence[int],
    *,
    context: int = CONTEXT,
    steps: int = STEPS,
) -> Iterator[Decoded]:
    """On one model; contexts are zeros, which take as long as any others."""
    most = max(batches)
    each = -(-(context + steps + 8) // BLOCK_TOKENS)
    dtype = str(ops.dtype).removeprefix("torch.")
    geometry = kv_geometry(config, dtype, most * each)
    shared = mmap.mmap(-1, geometry.pool_bytes)
    device.pin(torch.frombuffer(shared, dtype=torch.uint8))
    stage = whole_stage(RandomWeights(config), ops)
    stepper = DeviceStepper(stage, geometry, shared, device, most=most, context=context + steps + 8)
    for batch in batches:
        seconds = _steps(stepper, batch, each, context, steps)
        yield Decoded(batch, seconds, step_bytes(config, batch, context + steps // 2))


def _steps(stepper: DeviceStepper, batch: int, each: int, context: int, steps: int) -> float:
    """Seconds of one of `steps`, which follow each other."""

    def plan(step: int) -> StepPlan:
        rows = [
            Row(
                SequenceId(str(number)),
                (0,),
                context + step,
                (tuple(range(number * each, (number + 1) * each)),),
                _GREEDY,
                follows=step > 0,
            )
            for number in range(batch)
        ]
        return StepPlan(step, tuple(rows))

    for step in range(3):
        stepper.land(stepper.launch(plan(step)))
    if not stepper.capture(batch):
        raise InternalError(f"a step of {batch} rows cannot be captured")
    given: list[Launched] = []
    for step in range(3, 3 + steps):
        given.append(stepper.launch(plan(step), batch))
        if len(given) > MOST_AHEAD - 1:
            stepper.land(given[-MOST_AHEAD])
    stepper.land(given[-1])
    return given[-1].computed.since(given[0].computed) / (steps - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/bench-decode.json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        _say("bench-decode: no CUDA device here, nothing was measured")
        return 0
    from core.engine.gpu.cuda import CudaDevice
    from kernels.bench_triton import ceilings, cuda_timer, versions
    from kernels.triton.ops import TritonOps

    device = CudaDevice()
    rate = ceilings(device.where, cuda_timer).copy
    figures: list[dict[str, object]] = []
    kept = True
    ops = TritonOps(torch.bfloat16, device.where)
    for one in measure(LLAMA_1B, ops, device, tuple(GOALS)):
        target, floor = GOALS[one.batch]
        share = one.share(rate)
        kept = kept and share >= floor
        _say(
            f"engine decode, 1B Llama bf16, batch {one.batch:2}: {one.seconds * 1e3:.2f} ms a step,"
            f" {one.batch / one.seconds:.0f} tok/s, {share:.0%} of the bandwidth bound"
            f" (target {target:.0%}, floor {floor:.0%})"
        )
        figures.append(
            {
                "name": f"engine decode, batch {one.batch}",
                "value": round(share, 4),
                "unit": "share of the bound at the measured copy rate",
                "target": target,
                "floor": floor,
            }
        )
    card = torch.cuda.get_device_name(device.where)
    machine = f"{card}, {platform.machine()}"
    record = {"command": COMMAND, "machine": machine, "versions": versions(), "figures": figures}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if kept else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
