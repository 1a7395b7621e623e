"""Every implementation of the operations against plain definitions, on ragged shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu.build import compiler, library_path
from kernels.linear import Dense, nibbles
from kernels.ops import Ops, TorchOps, select
from kernels.paged_attention import PagedRows
from kernels.rotary import angles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=["reference", "chosen", "chosen, 2 threads"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """`chosen` is native code where it was built, else the reference once more."""
    if request.param == "reference":
        return TorchOps()
    return select("cpu", threads=2 if "2" in request.param else 1)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (3, 17), (40, 128)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight = random(tokens, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    residual = random(tokens, hidden, dtype=dtype, seed=2)

    def norm(value: Tensor) -> Tensor:
        value = value.double()
        return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_near(ops.rms_norm(x, weight, 1e-5), norm(x), dtype)
    total = x + residual
    before = x.clone()
    assert_near(ops.add_rms_norm(x, residual, weight, 1e-5), norm(total), dtype)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(ops: Ops, dtype: torch.dtype) -> None:
    gate_up = random(11, 2 * 37, dtype=dtype) * 20
    gate_up[0, :4] = torch.tensor([0.0, 90.0, -90.0, -200.0])
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(ops.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 16), (8, 1, 64), (10, 2, 128), (6, 2, 20)]
)
def test_attention_over_pages(
    ops: Ops, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Decode rows and prompt chunks of ragged contexts, in a pool full of NaN with holes."""
    shapes = [(1, 0), (1, 15), (1, 16), (1, 333), (1, 31), (7, 0), (20, 13), (300, 40)]
    layers, wanted_layer, block_tokens = 2, 1, 16
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).int()
    pool = torch.full((64, layers, 2, kv_heads, block_tokens, dim), float("nan"), dtype=dtype)
    kv = pool[:, wanted_layer]
    tables = torch.full((len(shapes), 30), 2**30, dtype=torch.int32)  # padding names no block
    qkv = random(sum(new for new, _ in shapes), heads + 2 * kv_heads, dim, dtype=dtype)
    spans, slots, expected, first, taken = [], [], [], 0, 0
    positions: list[int] = []
    for row, (new, before) in enumerate(shapes):
        count = -(-(new + before) // block_tokens)
        tables[row, :count] = order[taken : taken + count]
        taken += count
        past = random(before, 2, kv_heads, dim, dtype=dtype, seed=row)
        for at in range(before):
            kv[tables[row, at // block_tokens], :, :, at % block_tokens] = past[at]
        own = range(before, before + new)
        slots += [int(tables[row, at // block_tokens]) * block_tokens + at % 16 for at in own]
        expected.append(_defined(qkv[first : first + new], past, before, heads, kv_heads))
        spans.append((first, new, before))
        positions += own
        first += new
    cos, sin = angles(torch.tensor(positions), _frequencies(dim))
    rows = PagedRows(
        starts=tuple(before for _, before in shapes),
        lengths=tuple(new for new, _ in shapes),
        decode=5,
        tables=tables,
        slots=torch.tensor(slots),
        spans=torch.tensor(spans, dtype=torch.int32),
    )
    ours = ops.attention(qkv.clone(), kv, rows, cos, sin, dim**-0.5)
    assert_near(ours, torch.cat(expected), dtype)
    assert pool[:, 1 - wanted_layer].isnan().all()


def _frequencies(dim: int) -> Tensor:
    return torch.tensor([100.0 ** (-2 * i / dim) for i in range(dim // 2)])


def _defined(qkv: Tensor, past: Tensor, before: int, heads: int, kv_heads: int) -> Tensor:
    """Attention in double, without folding or pages; new keys are rounded as the pool does."""
    dim, new = qkv.shape[-1], qkv.shape[0]
    positions = torch.arange(before, before + new).double()[:, None, None]
    angle = positions * _frequencies(dim).double()
    a, b = qkv[:, : heads + kv_heads].double().chunk(2, -1)
    both = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    turned = both.to(qkv.dtype).double()
    group = heads // kv_heads
    keys = torch.cat((past[:, 0].double(), turned[:, heads:])).repeat_interleave(group, 1)
    values = torch.cat((past[:, 1], qkv[:, heads + kv_heads :])).double()
    scores = torch.einsum("nhd,thd->nht", turned[:, :heads], keys) / math.sqrt(dim)
    future = torch.arange(before + new) > torch.arange(before, before + new)[:, None]
    scores.masked_fill_(future[:, None], float("-inf"))
    shares = scores.softmax(-1)
    mixed = torch.einsum("nht,thd->nhd", shares, values.repeat_interleave(group, 1))
    return mixed.reshape(new, heads * dim)


def test_attention_of_large_and_poisoned_scores(ops: Ops) -> None:
    """Scores of ±10⁴ stay finite; a NaN query stays in its own row."""
    pool = torch.zeros(4, 2, 1, 16, 64)
    qkv = random(2, 3, 64) * 300
    qkv[1, 0, 5] = float("nan")
    rows = PagedRows(
        starts=(0, 0),
        lengths=(1, 1),
        decode=2,
        tables=torch.tensor([[3], [1]], dtype=torch.int32),
        slots=torch.tensor([48, 16]),
        spans=torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=torch.int32),
    )
    out = ops.attention(qkv.clone(), pool, rows, torch.ones(2, 32), torch.zeros(2, 32), 0.125)
    assert_near(out[0], qkv[0, 2], torch.float32)
    assert out[1].isnan().all()


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1", "F16"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 33])
def test_quantised_product(ops: Ops, encoding: str, tokens: int) -> None:
    out, columns = 128, 96
    blocks, exact = _blocks(encoding, out, columns)
    dense = Dense(exact.to(torch.bfloat16))
    linear = ops.quantised(dense, encoding, blocks)
    assert linear.shape == (out, columns)
    x = random(tokens, columns, dtype=torch.bfloat16)
    expected = x.double() @ exact.double().T
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < 5e-3


def test_native_blocks_are_exact_where_the_dense_weight_is_rounded() -> None:
    ops = select("cpu")
    blocks, exact = _blocks("Q4_1", 256, 576)
    dense = Dense(exact.to(torch.bfloat16))
    linear = ops.quantised(dense, "Q4_1", blocks)
    if isinstance(ops, TorchOps):
        pytest.skip("native kernels are not built")
    x = random(4, 576, dtype=torch.bfloat16)
    expected = (x.double() @ exact.double().T).to(torch.bfloat16)
    assert (linear(x) != expected).float().mean() < 0.01  # a sum on the edge of rounding
    assert (dense(x) != expected).float().mean() > 0.05


def test_quantised_keeps_the_dense_product_where_blocks_do_not_fit(ops: Ops) -> None:
    blocks, exact = _blocks("Q4_0", 64, 64)
    single = Dense(exact)
    assert ops.quantised(single, "Q4_0", blocks) is single
    biased = Dense(exact.to(torch.bfloat16), torch.ones(64, dtype=torch.bfloat16))
    assert ops.quantised(biased, "Q4_0", blocks) is biased


def _blocks(encoding: str, out: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random blocks and the numbers that they stand for."""
    count = out * columns // 32
    grid = (random(count, 2) * 0.1).half()
    generator = torch.Generator().manual_seed(3)
    if encoding == "F16":
        plain = random(out, columns).half()
        return plain.view(torch.uint8), plain.float()
    if encoding == "Q8_0":
        values = torch.randint(-127, 128, (count, 32), dtype=torch.int8, generator=generator)
        head = grid[:, :1].contiguous().view(torch.uint8)
        blocks = torch.cat((head, values.view(torch.uint8)), 1)
        return blocks.view(out, -1), (values * grid[:, :1].float()).view(out, columns)
    packed = torch.randint(0, 256, (count, 16), dtype=torch.uint8, generator=generator)
    head = grid[:, : 1 if encoding == "Q4_0" else 2].contiguous().view(torch.uint8)
    blocks = torch.cat((head, packed), 1).view(out, -1)
    values, scales, zeros = nibbles(encoding, blocks)
    exact = values.view(out, -1, 32).float() * scales.unsqueeze(-1) + zeros.unsqueeze(-1)
    return blocks, exact.view(out, columns)


def test_native_code_is_chosen_where_it_was_built() -> None:
    native = not isinstance(select("cpu"), TorchOps)
    assert native == library_path().exists()
    assert isinstance(select("cpu", native=False), TorchOps)
    assert isinstance(select("meta"), TorchOps)


def test_build_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from kernels.cpu import build

    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.build() == "no C++ compiler was found"
    assert not build.library_path().exists()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_build_reports_what_the_compiler_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from kernels.cpu import build

    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr(build, "_FLAGS", ("-not-a-flag",))
    reason = build.build()
    assert reason is not None
    assert "not-a-flag" in reason
    assert not list(build.library_path().parent.iterdir())
