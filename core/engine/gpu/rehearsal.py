"""Which kernels a model will use, and their compilation ahead of it. Imports triton."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from core.models.config import ModelConfig
from kernels.triton.rehearse import Sizes
from kernels.triton.rehearse import rehearse as rehearse_kernels


def rehearse(model: ModelConfig, dtype: torch.dtype, where: torch.device) -> None:
    # Kernels are launched on a thread's own device, and this thread is new.
    here = torch.cuda.device(where) if where.type == "cuda" else nullcontext()
    with here, torch.inference_mode():
        rehearse_kernels(sizes_of(model), dtype, where)


def sizes_of(model: ModelConfig) -> Sizes:
    moe, latent = model.moe, model.latent
    widths = set() if moe is not None and len(moe.layers) == model.layers else {model.intermediate}
    if moe is not None and moe.shared_width:
        widths.add(moe.shared_width)
    return Sizes(
        hidden=model.hidden,
        widths=tuple(sorted(widths)),
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        rotary_dim=model.rotary_dim,
        windows=tuple(dict.fromkeys(model.window(layer) for layer in range(model.layers))),
        normed=model.qk_norm,
        rank=latent.rank if latent is not None else 0,
        experts=(moe.count, moe.width) if moe is not None else None,
    )
