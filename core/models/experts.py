"""Reads the weights of a mixture of experts (Qwen3-MoE, DeepSeek-V3)."""

from __future__ import annotations

from core.errors import ConfigError
from core.models.quantised import StoredTensor
from core.models.reader import Reader
from kernels.layers import ExpertsMlp
from kernels.routing import Routing


def read_experts(reader: Reader, name: str, kept: range | None = None) -> ExpertsMlp:
    """`name` is of the layer's MLP. `kept`: the experts that are read, None: all; the router scores
    all of them all the same. Raises ConfigError."""
    config, ops = reader.config, reader.ops
    moe, hidden = config.moe, config.hidden
    if moe is None:
        raise ConfigError(f"{name}: the model has no experts")

    def stored(expert: int, part: str, rows: int, columns: int) -> StoredTensor:
        return reader.stored(f"{name}.experts.{expert}.{part}.weight", (rows, columns))

    gate_up, down = [], []
    for expert in range(moe.count) if kept is None else kept:
        gate_up.append(
            [stored(expert, part, moe.width, hidden) for part in ("gate_proj", "up_proj")]
        )
        down.append([stored(expert, "down_proj", hidden, moe.width)])
    correction = None
    if moe.corrected:
        bias = reader.stored(f"{name}.gate.e_score_correction_bias", (moe.count,))
        correction = ops.matrix([bias], exact=True)[0]
    return ExpertsMlp(
        router=ops.matrix([reader.stored(f"{name}.gate.weight", (moe.count, hidden))], exact=True),
        correction=correction,
        routing=Routing(
            chosen=moe.chosen,
            sigmoid=moe.sigmoid,
            normalised=moe.normalised,
            scale=moe.scale,
            groups=moe.groups,
            kept_groups=moe.kept_groups,
        ),
        experts=ops.experts(gate_up, down),
        shared=(
            reader.gated(f"{name}.shared_experts", moe.shared_width, bias=False)
            if moe.shared_width
            else None
        ),
    )
