"""Rotary position embedding of q and k in place, half-split: pairs are (i, i + dim/2) of a head.

(a, b) → (a·cos − b·sin, b·cos + a·sin) in fp32. One program takes a token's q and k heads, so that
its angles are read once. Where cos and sin cover less than half of the head's dim, the rest of the
head stays as it is. Norms of single heads (Qwen3) take no pass of their own: the head is in
registers already.

Bytes: 2 · tokens · (heads + kv_heads) · rotated dim · element: memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """q [tokens, heads, dim], k [tokens, kv_heads, dim], strided; cos, sin [tokens, half] fp32.

    `norms`: weights [dim] of an RMSNorm over each head of q and of k, which comes first; then the
    whole head is rotated, half = dim / 2.
    """
    tokens, heads, dim = q.shape
    if q.stride(2) != 1 or k.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            "q and k need a contiguous last axis, cos and sin none but contiguous ones"
        )
    if tokens == 0:
        return
    half = cos.shape[1]
    if norms is not None and 2 * half != dim:
        raise ValueError(f"a head of {dim} that is normed is rotated whole, not {2 * half} of it")
    kv_heads = k.shape[1]
    most = max(heads, kv_heads)
    _rotate[(tokens,)](
        q,
        k,
        cos,
        sin,
        cos if norms is None else norms[0],
        cos if norms is None else norms[1],
        eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        TALL=min(16, triton.next_power_of_2(most)),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        NORM=norms is not None,
        num_warps=4,
    )


@triton.jit
def _turn(
    base,
    head_stride,
    heads,
    head_count,
    pair,
    cos,
    sin,
    norm,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    wanted = (heads < head_count)[:, None] & (pair < HALF)[None, :]
    place = base + heads[:, None] * head_stride + pair[None, :]
    a = tl.load(place, mask=wanted, other=0.0).to(tl.float32)
    b = tl.load(place + HALF, mask=wanted, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * HALF) + eps)[:, None]
        inside = pair < HALF
        first = tl.load(norm + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = tl.load(norm + HALF + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
        # Rounded as a norm of its own would leave it.
        a = (a * scale * first).to(base.dtype.element_ty).to(tl.float32)
        b = (b * scale * second).to(base.dtype.element_ty).to(tl.float32)
    tl.store(place, (a * cos - b * sin).to(base.dtype.element_ty), mask=wanted)
    tl.store(place + HALF, (b * cos + a * sin).to(base.dtype.element_ty), mask=wanted)


@triton.jit
def _rotate(
    q,
    k,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    q_token,
    q_head,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TALL: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    some = tl.arange(0, TALL)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(0, HEADS, TALL):
        rows = first + some
        _turn(q + token * q_token, q_head, rows, HEADS, pair, c, s, q_norm, eps, HALF, NORM)
    for first in tl.static_range(0, KV_HEADS, TALL):
        rows = first + some
        _turn(k + token * k_token, k_head, rows, KV_HEADS, pair, c, s, k_norm, eps, HALF, NORM)
