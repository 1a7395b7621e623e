"""Store the keys and values, or the latents, of new tokens into their slots of the paged pool."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor) -> None:
    """keys, values [tokens, kv_heads, dim]; kv [blocks, 2, kv_heads, block_tokens, dim], strided.

    `slots` [tokens]: block · block_tokens + offset of each token; all different.
    """
    block_tokens = kv.shape[3]
    blocks = torch.div(slots, block_tokens, rounding_mode="floor")
    kv[blocks, :, :, slots - blocks * block_tokens] = torch.stack((keys, values), 1).to(kv.dtype)


def write_latents(latents: Tensor, pool: Tensor, slots: Tensor) -> None:
    """latents [tokens, width] into pool [blocks, block_tokens, width], strided; slots as above."""
    block_tokens = pool.shape[1]
    blocks = torch.div(slots, block_tokens, rounding_mode="floor")
    pool[blocks, slots - blocks * block_tokens] = latents.to(pool.dtype)
