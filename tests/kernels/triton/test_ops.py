"""A decoder's layers on the kernels give what the references give, step after step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.experts import DenseExperts, Experts
from kernels.layers import (
    ExpertsMlp,
    GatedMlp,
    HeadAttention,
    LatentAttention,
    Layer,
    Layers,
    Shape,
)
from kernels.linear import Dense
from kernels.paged_attention import PagedRows
from kernels.routing import Routing
from kernels.stepwise import TorchLayers
from kernels.triton.ops import TritonExperts, TritonLayers, TritonOps
from tests.kernels.triton.cases import BLOCK, DEVICE, HOLE, assert_near, integers, nan, random

HEADS, KV_HEADS, DIM, HIDDEN, WIDTH, WINDOW = 6, 2, 16, 40, 56, 20
SHAPE = Shape(
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=DIM,
    norm_eps=1e-5,
    scale=0.2,
    inverse_frequencies=torch.tensor([30.0 ** (-i / 8) for i in range(8)], device=DEVICE),
)


def dense(out: int, columns: int, seed: int) -> Dense:
    return Dense(random(out, columns, seed=seed) / columns**0.5)


def layer(seed: int, window: int | None) -> Layer:
    return Layer(
        attention_norm=random(HIDDEN, seed=seed) + 1,
        attention=HeadAttention(
            qkv=dense((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, seed + 1),
            output=dense(HIDDEN, HEADS * DIM, seed + 2),
            window=window,
        ),
        mlp_norm=random(HIDDEN, seed=seed + 3) + 1,
        mlp=GatedMlp(
            gate_up=dense(2 * WIDTH, HIDDEN, seed + 4),
            down=dense(HIDDEN, WIDTH, seed + 5),
        ),
    )


def rows_of(shapes: list[tuple[int, int]]) -> tuple[PagedRows, torch.Tensor]:
    """Row r lies in blocks 5·r and following, downwards; shapes are (start, length)."""
    tables = torch.full((len(shapes), 6), HOLE, dtype=torch.int32)
    spans: list[tuple[int, int, int]] = []
    slots: list[int] = []
    positions: list[int] = []
    for row, (start, length) in enumerate(shapes):
        for at in range(-(-(start + length) // BLOCK)):
            tables[row, at] = 5 * row + 4 - at
        spans.append((len(slots), length, start))
        for position in range(start, start + length):
            slots.append(int(tables[row, position // BLOCK]) * BLOCK + position % BLOCK)
            positions.append(position)
    rows = PagedRows(
        starts=tuple(start for start, _ in shapes),
        lengths=tuple(length for _, length in shapes),
        decode=sum(length == 1 for _, length in shapes),
        tables=tables.to(DEVICE),
        slots=integers(slots, torch.int64),
        spans=integers(spans),
    )
    return rows, integers(positions, torch.int64)


def test_layers() -> None:
    """Two prompts; one step mixes a decode row with a chunk; then both decode."""
    layers = [layer(10, None), layer(20, WINDOW)]
    ours, theirs = TritonLayers(layers, SHAPE), TorchLayers(layers, SHAPE)
    pools = [nan(10, 2, 2, KV_HEADS, BLOCK, DIM, dtype=torch.float32) for _ in range(2)]
    implementations: tuple[Layers, Layers] = (ours, theirs)
    for step, shapes in enumerate(
        [[(0, 30), (0, 17)], [(30, 1), (17, 33)], [(31, 1), (50, 1)], [(32, 1)]]
    ):
        rows, positions = rows_of(shapes)
        residual = random(len(positions), HIDDEN, seed=step)
        found = [
            run(residual.clone(), positions, (rows,), pool.unbind(1))
            for run, pool in zip(implementations, pools, strict=True)
        ]
        assert_near(found[0], found[1], torch.float32)
    torch.testing.assert_close(pools[0], pools[1], atol=1e-5, rtol=1e-5, equal_nan=True)
    assert (~pools[0].isnan()).sum() == 2 * 2 * KV_HEADS * DIM * (33 + 51)


LATENT = Shape(
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=1,
    head_dim=24,
    norm_eps=1e-5,
    scale=0.2,
    inverse_frequencies=torch.tensor([30.0 ** (-i / 4) for i in range(4)], device=DEVICE),
)
NOPE, ROPE, VALUE, RANK = 16, 8, 12, 20
EXPERTS, CHOSEN = 5, 2


def latent_layer(seed: int, compressed: bool) -> tuple[Layer, Layer]:
    """One layer, with experts of either kind."""
    width = 14 if compressed else HIDDEN
    gate_up = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=seed) / HIDDEN**0.5
    down = random(EXPERTS, HIDDEN, WIDTH, seed=seed + 1) / WIDTH**0.5

    def made(experts: Experts) -> Layer:
        return Layer(
            attention_norm=random(HIDDEN, seed=seed + 2) + 1,
            attention=LatentAttention(
                query_down=dense(width, HIDDEN, seed + 3) if compressed else None,
                query_norm=random(width, seed=seed + 4) + 1 if compressed else None,
                query_up=dense(HEADS * (NOPE + ROPE), width, seed + 5),
                kv_down=dense(RANK + ROPE, HIDDEN, seed + 6),
                kv_norm=random(RANK, seed=seed + 7) + 1,
                key_up=random(HEADS, NOPE, RANK, seed=seed + 8) / RANK**0.5,
                value_up=random(HEADS, VALUE, RANK, seed=seed + 9) / RANK**0.5,
                output=dense(HIDDEN, HEADS * VALUE, seed + 10),
                scale=0.3,
                rotary_scale=1.3,
                norm_eps=1e-6,
            ),
            mlp_norm=random(HIDDEN, seed=seed + 11) + 1,
            mlp=ExpertsMlp(
                router=random(EXPERTS, HIDDEN, seed=seed + 12),
                correction=random(EXPERTS, seed=seed + 13),
                routing=Routing(chosen=CHOSEN, sigmoid=True, scale=2.0),
                experts=experts,
                shared=GatedMlp(
                    dense(2 * WIDTH, HIDDEN, seed + 14), dense(HIDDEN, WIDTH, seed + 15)
                ),
            ),
        )

    return made(TritonExperts(gate_up, down)), made(DenseExperts(gate_up, down))


def test_latents_and_experts() -> None:
    """Prompts, a decode row beside a chunk, decode rows alone; in the middle of the layers a
    reduction, which both must call."""
    first, second = latent_layer(10, True), latent_layer(40, False)
    halved = replace(LATENT, reduce=lambda update: update / 2)
    implementations: tuple[Layers, Layers] = (
        TritonLayers((first[0], second[0]), halved),
        TorchLayers((first[1], second[1]), halved),
    )
    pools = [nan(10, 2, 1, 1, BLOCK, RANK + ROPE, dtype=torch.float32) for _ in range(2)]
    for step, shapes in enumerate([[(0, 9), (0, 4)], [(9, 1), (4, 13)], [(10, 1), (17, 1)]]):
        rows, positions = rows_of(shapes)
        residual = random(len(positions), HIDDEN, seed=step)
        found = [
            run(residual.clone(), positions, (rows,), pool.unbind(1))
            for run, pool in zip(implementations, pools, strict=True)
        ]
        assert_near(found[0], found[1], torch.float32)
        plain = TorchLayers((first[1], second[1]), LATENT)
        other = plain(residual.clone(), positions, (rows,), pools[1].clone().unbind(1))
        assert (other - found[1]).abs().max() > 0.1
    torch.testing.assert_close(pools[0], pools[1], atol=1e-5, rtol=1e-5, equal_nan=True)


def test_norms_of_heads() -> None:
    base = layer(10, None)
    assert isinstance(base.attention, HeadAttention)
    attention = replace(
        base.attention, query_norm=random(DIM, seed=1), key_norm=random(DIM, seed=2)
    )
    normed = replace(base, attention=attention)
    rows, positions = rows_of([(0, 9), (0, 4)])
    residual = random(len(positions), HIDDEN)
    found = [
        run(
            residual.clone(),
            positions,
            (rows,),
            nan(10, 1, 2, KV_HEADS, BLOCK, DIM, dtype=torch.float32).unbind(1),
        )
        for run in (
            TritonLayers((normed,), SHAPE),
            TorchLayers((normed,), SHAPE),
            TorchLayers((base,), SHAPE),
        )
    ]
    assert_near(found[0], found[1], torch.float32)
    assert (found[1] - found[2]).abs().max() > 0.1


def test_no_layers_leave_the_residual() -> None:
    rows, positions = rows_of([(0, 1)])
    residual = random(1, HIDDEN)
    assert torch.equal(TritonLayers((), SHAPE)(residual, positions, (rows,), ()), residual)


class Plain:
    """A stored fp32 weight."""

    encoding, pairs = "F32", 0

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.data = weight.contiguous().view(torch.uint8)
        self.columns = weight.shape[1]

    def decode(self, out: torch.Tensor) -> None:
        out.copy_(self._weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_decoded_once_and_shared(dtype: torch.dtype) -> None:
    """A head tied to the embedding is the same memory; several parts become one product."""
    ops = TritonOps(dtype, DEVICE)
    table, other = Plain(torch.randn(7, 5)), Plain(torch.randn(3, 5))
    embedding = ops.embedding(table)
    ids = integers([3, 0], torch.int64)
    assert torch.equal(embedding(ids).cpu(), table._weight[[3, 0]].to(dtype))
    head, both = ops.linear([table], None), ops.linear([other, table], None)
    assert isinstance(head, Dense)
    assert head.weight.data_ptr() == embedding.weight.data_ptr()  # type: ignore[attr-defined]  # its own class
    assert both.shape == (10, 5)
    x = random(2, 5, dtype=dtype)
    assert_near(both(x)[:, 3:], head(x), dtype)
    assert torch.equal(ops.vector(Plain(torch.ones(1, 4))).cpu(), torch.ones(4, dtype=dtype))
    assert_near(
        ops.rms_norm(x, ops.vector(Plain(torch.ones(1, 5))), 0.0).square().mean(-1),
        torch.ones(2),
        dtype,
    )


@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_rows_of_padding_change_nothing(kind: str) -> None:
    """As a captured decode step has them: start and slot −1, and host tuples that only bound."""
    latent = kind == "latents"
    made, shape = (latent_layer(10, True)[0], LATENT) if latent else (layer(10, None), SHAPE)
    run = TritonLayers((made,), shape)
    size = (1, 1, BLOCK, RANK + ROPE) if latent else (2, KV_HEADS, BLOCK, DIM)
    pool = nan(10, 1, *size, dtype=torch.float32)
    rows, positions = rows_of([(0, 30), (0, 17)])
    run(random(47, HIDDEN), positions, (rows,), pool.unbind(1))
    rows, positions = rows_of([(30, 1), (17, 1)])
    residual = random(2, HIDDEN, seed=3)
    other = pool.clone()
    expected = run(residual.clone(), positions, (rows,), other.unbind(1))
    minus = integers([-1, -1], torch.int64)
    padded = PagedRows(
        starts=(95,) * 4,
        lengths=(1,) * 4,
        decode=4,
        tables=torch.cat((rows.tables, torch.full_like(rows.tables, HOLE))),
        slots=torch.cat((rows.slots, minus)),
        spans=torch.cat((rows.spans, integers([(2, 1, -1), (3, 1, -1)]))),
    )
    more = torch.cat((residual, random(2, HIDDEN, seed=4)))
    ours = run(more, torch.cat((positions, minus + 1)), (padded,), pool.unbind(1))
    assert_near(ours[:2], expected, torch.float32)
    assert ours.isfinite().all()
    torch.testing.assert_close(pool, other, equal_nan=True)
