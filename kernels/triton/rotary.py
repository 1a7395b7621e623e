"""Rotary position embedding of q and k in place, half-split: pairs are (i, i + dim/2) of a head.

(a, b) → (a·cos − b·sin, b·cos + a·sin) in fp32. One program takes a token's q and k heads, so that
its angles are read once. Where cos and sin cover less than half of the head's dim, the rest of the
head stays as it is.

Bytes: 2 · tokens · (heads + kv_heads) · rotated dim · element: memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """q [tokens, heads, dim], k [tokens, kv_heads, dim], strided; cos, sin [tokens, half] fp32."""
    tokens, heads, _ = q.shape
    if q.stride(2) != 1 or k.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            "q and k need a contiguous last axis, cos and sin none but contiguous ones"
        )
    if tokens == 0:
        return
    half = cos.shape[1]
    kv_heads = k.shape[1]
    most = max(heads, kv_heads)
    _rotate[(tokens,)](
        q,
        k,
        cos,
        sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        TALL=min(16, triton.next_power_of_2(most)),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        num_warps=4,
    )


@triton.jit
def _turn(base, head_stride, heads, head_count, pair, cos, sin, HALF: tl.constexpr):
    wanted = (heads < head_count)[:, None] & (pair < HALF)[None, :]
    place = base + heads[:, None] * head_stride + pair[None, :]
    a = tl.load(place, mask=wanted, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=wanted, other=0.0).to(tl.float32)
    tl.store(place, (a * cos - b * sin).to(base.dtype.element_ty), mask=wanted)
    tl.store(place + HALF, (b * cos + a * sin).to(base.dtype.element_ty), mask=wanted)


@triton.jit
def _rotate(
    q,
    k,
    cos,
    sin,
    q_token,
    q_head,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TALL: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    some = tl.arange(0, TALL)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(0, HEADS, TALL):
        _turn(q + token * q_token, q_head, first + some, HEADS, pair, c, s, HALF)
    for first in tl.static_range(0, KV_HEADS, TALL):
        _turn(k + token * k_token, k_head, first + some, KV_HEADS, pair, c, s, HALF)
