"""Store the keys and values, or latents, of new tokens into their slots of the paged pool.

Bytes: 2 · 2 · tokens · kv_heads · dim · element, read and written: memory. One program a token, so
that a token's heads leave in one wave of stores; a head's dim is what lies together in the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_kv(keys: Tensor, values: Tensor, kv: Tensor, slots: Tensor) -> None:
    """keys, values [tokens, kv_heads, dim], strided; kv [blocks, 2, kv_heads, block_tokens, dim].

    `slots` [tokens] int64: block · block_tokens + offset, all different; a negative one is a row
    of padding and is left out.
    """
    if kv.stride(4) != 1 or keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("keys, values and KV need a contiguous last axis")
    if keys.shape[0]:
        _launch(keys, values, kv, slots)


def write_latents(latents: Tensor, pool: Tensor, slots: Tensor) -> None:
    """latents [tokens, width], strided, into pool [blocks, block_tokens, width]; slots as above.

    Bytes: 2 · tokens · width · element.
    """
    if pool.stride(2) != 1 or latents.stride(1) != 1:
        raise ValueError("latents and their pool need a contiguous last axis")
    if latents.shape[0]:
        _launch(latents[:, None], None, pool[:, None, None], slots)


def _launch(keys: Tensor, values: Tensor | None, kv: Tensor, slots: Tensor) -> None:
    tokens, kv_heads, dim = keys.shape
    paired = values is not None
    values = keys if values is None else values
    _write[(tokens,)](
        keys,
        values,
        kv,
        slots,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        HEADS=kv_heads,
        HEADS_PAD=triton.next_power_of_2(kv_heads),
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        BLOCK=kv.shape[3],
        PAIRED=paired,
        num_warps=4 if kv_heads * dim >= 512 else 1,
    )


@triton.jit
def _write(
    keys,
    values,
    kv,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    kv_block,
    kv_value,
    kv_head,
    kv_token,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    wanted = (heads < HEADS) & (dims < DIM)
    key = tl.load(keys + token * k_token + heads * k_head + dims, mask=wanted, other=0.0)
    place = kv + (slot // BLOCK) * kv_block + (slot % BLOCK) * kv_token + heads * kv_head + dims
    tl.store(place, key, mask=wanted)
    if PAIRED:
        value = tl.load(values + token * v_token + heads * v_head + dims, mask=wanted, other=0.0)
        tl.store(place + kv_value, value, mask=wanted)
