"""Norm, rotary, gate, KV write and block copies against plain definitions and references."""

from __future__ import annotations

import pytest
import torch

from kernels import block_copy as reference
from kernels.rms_norm import rms_norm as reference_rms_norm
from kernels.rotary import angles, rotary
from kernels.triton.block_copy import gather_blocks, scatter_blocks
from kernels.triton.gated import silu_mul
from kernels.triton.kv_write import write_kv, write_latents
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate
from tests.kernels.triton.cases import (
    BLOCK,
    DEVICE,
    EACH_DTYPE,
    assert_near,
    integers,
    nan,
    random,
)


@EACH_DTYPE
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (3, 17), (5, 2048), (0, 8)])
def test_rms_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x = random(tokens, hidden + 5, dtype=dtype)[:, :hidden]
    weight = random(hidden, dtype=dtype, seed=1)
    residual = random(tokens, hidden, dtype=dtype, seed=2)

    def norm(value: torch.Tensor) -> torch.Tensor:
        value = value.double()
        return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_near(rms_norm(x, weight, 1e-5), norm(x), dtype)
    total = x + residual
    before = x.clone()
    summed = add_rms_norm(x, residual, weight, 1e-5)
    assert_near(summed, norm(total), dtype)
    assert torch.equal(summed, rms_norm(total, weight, 1e-5))  # of the rounded sum
    assert torch.equal(residual, total)
    assert torch.equal(x, before)


@EACH_DTYPE
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"), [(9, 3, 64, 64), (20, 1, 20, 20), (4, 4, 80, 24)]
)
def test_rotary(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, turned: int) -> None:
    """In place, in the q and k parts of one tensor; v and what is beyond the angles stay."""
    qkv = random(5, heads + 2 * kv_heads, dim, dtype=dtype)
    before = qkv.clone()
    positions = torch.tensor([0, 1, 900, 7, 31], device=DEVICE)
    frequencies = torch.tensor(
        [50.0 ** (-2 * i / turned) for i in range(turned // 2)], device=DEVICE
    )
    rotate(qkv[:, :heads], qkv[:, heads : heads + kv_heads], *angles(positions, frequencies))
    angle = (positions[:, None] * frequencies).double()[:, None]
    a, b = before[:, : heads + kv_heads, :turned].double().chunk(2, -1)
    wanted = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    tolerance = torch.float16 if dtype == torch.float32 else dtype  # angles of 900 in fp32
    assert_near(qkv[:, : heads + kv_heads, :turned], wanted, tolerance)
    assert torch.equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :])
    assert torch.equal(qkv[..., turned:], before[..., turned:])


@EACH_DTYPE
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (20, 1, 20), (4, 4, 128)])
def test_norms_of_heads_come_before_rotary(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = random(4, heads + 2 * kv_heads, dim, dtype=dtype) * 3
    norms = random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2)
    ends = (heads, heads + kv_heads)
    parts = qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]], qkv[:, ends[1] :]
    expected = [
        reference_rms_norm(part, norm, 1e-5).clone()
        for part, norm in zip(parts[:2], norms, strict=True)
    ]
    values = parts[2].clone()
    positions = torch.tensor([0, 1, 40, 7], device=DEVICE)
    frequencies = torch.tensor([9.0 ** (-2 * i / dim) for i in range(dim // 2)], device=DEVICE)
    turns = angles(positions, frequencies)
    rotate(parts[0], parts[1], *turns, norms=norms, eps=1e-5)
    for ours, normed in zip(parts[:2], expected, strict=True):
        assert_near(ours, rotary(normed, *turns), dtype)
    assert torch.equal(parts[2], values)
    with pytest.raises(ValueError, match="rotated whole"):
        rotate(parts[0], parts[1], *angles(positions, frequencies[1:]), norms=norms)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # e^200, numpy, in the interpreter
@EACH_DTYPE
@pytest.mark.parametrize(("tokens", "width"), [(4, 37), (1, 2048), (2, 3000), (0, 8)])
def test_silu_mul(dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up = random(tokens, 2 * width, dtype=dtype) * 20
    gate_up[:1, :4] = torch.tensor([0.0, 80.0, -80.0, -200.0])
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@EACH_DTYPE
@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (1, 20), (8, 128)])
def test_kv_write(dtype: torch.dtype, kv_heads: int, dim: int) -> None:
    """Every slot that was not named stays NaN; padding names none."""
    qkv = random(6, 2 + 2 * kv_heads, dim, dtype=dtype)
    keys, values = qkv[:, 2 : 2 + kv_heads], qkv[:, 2 + kv_heads :]
    pool = nan(5, 2, 2, kv_heads, BLOCK, dim, dtype=dtype)
    slots = [79, 16, -1, 0, 33, -7]
    write_kv(keys, values, pool[:, 1], integers(slots, torch.int64))
    for token, slot in enumerate(slots):
        if slot >= 0:
            place = pool[slot // BLOCK, 1, :, :, slot % BLOCK]
            assert torch.equal(place, torch.stack((keys[token], values[token])))
            place.fill_(float("nan"))
    assert pool.isnan().all()


@EACH_DTYPE
@pytest.mark.parametrize("width", [40, 576])
def test_latents_are_written_once(dtype: torch.dtype, width: int) -> None:
    """Into a pool without k/v and head axes; what lies behind stays NaN."""
    latents = random(4, width + 3, dtype=dtype)[:, :width]
    pool = nan(4, 2, 1, 1, BLOCK, width, dtype=dtype)
    slots = [50, -1, 0, 31]
    write_latents(latents, pool[:, 1, 0, 0], integers(slots, torch.int64))
    for token, slot in enumerate(slots):
        if slot >= 0:
            place = pool[slot // BLOCK, 1, 0, 0, slot % BLOCK]
            assert torch.equal(place, latents[token])
            place.fill_(float("nan"))
    assert pool.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(
    ("layers", "values", "kv_heads", "dim"), [(3, 2, 4, 20), (2, 1, 1, 576), (1, 2, 8, 128)]
)
def test_blocks_travel(
    dtype: torch.dtype, layers: int, values: int, kv_heads: int, dim: int
) -> None:
    """From a pool with all heads into one that holds some of them, at another place."""
    shape = (layers, values, kv_heads, BLOCK, dim)
    source = (random(6, *shape) * 40).abs().to(dtype)
    ids = integers([4, -1, 0, 5], torch.int64)
    first, count = kv_heads // 4, max(1, kv_heads // 2)
    piece = torch.full((4, layers, values, count, BLOCK, dim), 7, dtype=dtype, device=DEVICE)
    wanted = piece.clone()
    gather_blocks(source, ids, piece, first)
    reference.gather_blocks(source, ids, wanted, first)
    assert torch.equal(piece, wanted)
    assert torch.equal(piece[2], source[0, :, :, first : first + count])
    assert (piece[1] == 7).all()

    target = torch.full((9, layers, values, count + 1, BLOCK, dim), 9, dtype=dtype, device=DEVICE)
    expected = target.clone()
    places = integers([8, 2, -1, 3], torch.int64)
    scatter_blocks(piece, places, target, 1)
    reference.scatter_blocks(piece, places, expected, 1)
    assert torch.equal(target, expected)
    assert torch.equal(target[8, :, :, 1:], source[4, :, :, first : first + count])
    assert (target[:, :, :, 0] == 9).all()
    assert (target[[0, 1, 4, 5, 6, 7]] == 9).all()


def test_blocks_that_do_not_fit_are_refused() -> None:
    pool = nan(2, 1, 2, 4, BLOCK, 8, dtype=torch.float16)
    piece = nan(1, 1, 2, 2, BLOCK, 8, dtype=torch.float16)
    ids = integers([0], torch.int64)
    with pytest.raises(ValueError, match="do not fit"):
        gather_blocks(pool, ids, piece, 3)
    with pytest.raises(ValueError, match="do not fit"):
        scatter_blocks(piece.float(), ids, pool)
    with pytest.raises(ValueError, match="lie together"):
        gather_blocks(pool, ids, piece.transpose(3, 4).contiguous().transpose(3, 4))
