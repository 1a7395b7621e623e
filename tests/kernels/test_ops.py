"""Every implementation of the operations against plain definitions, on ragged shapes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.cpu.build import compiler, library_path
from kernels.cpu.native import NativeOps
from kernels.gated import silu_mul
from kernels.linear import Dense, nibbles
from kernels.ops import Ops, TorchOps, select
from kernels.rms_norm import add_rms_norm, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
IMPLEMENTATIONS = ["reference", "native", "native, 2 threads"]


def make(name: str, dtype: torch.dtype) -> Ops:
    if name == "reference":
        return TorchOps(dtype)
    chosen = select("cpu", dtype, threads=2 if "2" in name else 1)
    if isinstance(chosen, TorchOps):
        pytest.skip("native kernels are not built")
    return chosen


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_near(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.double(), expected.double(), atol=tolerance, rtol=tolerance)


@dataclass(frozen=True)
class Weight:
    """A `kernels.linear.Stored` made of bytes and the numbers that they stand for."""

    encoding: str
    data: Tensor
    exact: Tensor
    pairs: int = 0

    @property
    def columns(self) -> int:
        return self.exact.shape[1]

    def decode(self, out: Tensor) -> None:
        out.copy_(self.exact)


def weight(encoding: str, out: int, columns: int, seed: int = 3) -> Weight:
    """Random bytes in `encoding`."""
    count = out * columns // 32
    grid = (random(count, 2, seed=seed) * 0.1).half()
    generator = torch.Generator().manual_seed(seed)
    if encoding in ("F32", "F16", "BF16"):
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        plain = random(out, columns, seed=seed).to(kinds[encoding])
        return Weight(encoding, plain.view(torch.uint8), plain.float())
    if encoding == "Q8_0":
        values = torch.randint(-127, 128, (count, 32), dtype=torch.int8, generator=generator)
        head = grid[:, :1].contiguous().view(torch.uint8)
        blocks = torch.cat((head, values.view(torch.uint8)), 1)
        exact = (values * grid[:, :1].float()).view(out, columns)
        return Weight(encoding, blocks.view(out, -1), exact)
    packed = torch.randint(0, 256, (count, 16), dtype=torch.uint8, generator=generator)
    head = grid[:, : 1 if encoding == "Q4_0" else 2].contiguous().view(torch.uint8)
    blocks = torch.cat((head, packed), 1).view(out, -1)
    nibble, scales, zeros = nibbles(encoding, blocks)
    exact = nibble.view(out, -1, 32).float() * scales.unsqueeze(-1) + zeros.unsqueeze(-1)
    return Weight(encoding, blocks, exact.view(out, columns))


# ------------------------------------------------------------------ elementwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (3, 17), (40, 128)])
def test_rms_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, scale = random(tokens, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    residual = random(tokens, hidden, dtype=dtype, seed=2)

    def norm(value: Tensor) -> Tensor:
        value = value.double()
        return value / (value.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()

    assert_near(rms_norm(x, scale, 1e-5), norm(x), dtype)
    native = make("native", dtype)
    assert_near(native.rms_norm(x.float(), scale.float(), 1e-5), norm(x), torch.float32)
    total = x + residual
    before = x.clone()
    assert_near(add_rms_norm(x, residual, scale, 1e-5), norm(total), dtype)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(11, 2 * 37, dtype=dtype) * 20
    gate_up[0, :4] = torch.tensor([0.0, 90.0, -90.0, -200.0])
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate / (1 + (-gate).exp()) * up
    assert_near(silu_mul(gate_up), expected, dtype)
    native = make("native", dtype)
    assert isinstance(native, NativeOps)
    assert_near(native.silu_mul(gate_up.float()), expected, torch.float32)


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 33])
def test_product(name: str, dtype: torch.dtype, encoding: str, tokens: int) -> None:
    """Panels that are not full, a bias, and two stored matrices in one product."""
    chosen = make(name, dtype)
    parts = [weight(encoding, 128, 96), weight(encoding, 37, 96, seed=4)]
    bias = random(165, seed=9)
    linear = chosen.linear(parts, bias.to(dtype if name == "reference" else torch.float32))
    assert linear.shape == (165, 96)
    x = random(tokens, 96)
    exact = torch.cat([part.exact for part in parts]).double()
    expected = x.double() @ exact.T + bias.double()
    ours = linear(x.to(dtype) if name == "reference" else x)
    error = (ours.double() - expected).norm() / expected.norm()
    integers = name != "reference" and encoding[0] == "Q"
    limit = 1e-6 if dtype == torch.float32 else 1e-2 if integers else 5e-3
    assert error < limit


def with_outliers(tokens: int) -> Tensor:
    """In the second block of every third row, and in the third of the last row, all are large."""
    x = random(tokens, 96)
    x[::3, 32:64] *= 50
    x[-1, 64:96] *= 80
    return x


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_outliers_keep_sixteen_bits(encoding: str) -> None:
    """Their step would be as large as what the other blocks hold."""
    stored = weight(encoding, 64, 96)
    x = torch.cat((random(1, 32) * 0.01, random(1, 32, seed=5) * 10, random(1, 32) * 0.01), 1)
    ours = make("native", torch.bfloat16).linear([stored], None)(x)
    expected = x.double() @ stored.exact.double().T
    # no block reaches five times the row's root mean square: eight bits
    assert 5e-4 < (ours - expected).norm() / expected.norm() < 2e-2
    x[:, 40] *= 20
    ours = make("native", torch.bfloat16).linear([stored], None)(x)
    expected = x.double() @ stored.exact.double().T
    assert (ours - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tokens", [2, 8, 9, 33])
def test_a_neighbour_with_outliers_changes_no_bit(encoding: str, tokens: int) -> None:
    linear = make("native", torch.bfloat16).linear([weight(encoding, 80, 96)], None)
    x = with_outliers(tokens)
    together = linear(x)
    for row in range(tokens):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_different_encodings_come_out_as_alone(dtype: torch.dtype) -> None:
    """Panels of one pair may have other bits, or be floats."""
    chosen = make("native", dtype)
    encodings = ["Q4_1", "Q8_0", "Q4_0", "BF16", "Q8_0"]
    parts = [weight(one, 48, 96, seed=n) for n, one in enumerate(encodings)]
    x = with_outliers(13)
    ours = chosen.linear(parts, None)(x)
    alone = torch.cat([chosen.linear([part], None)(x) for part in parts], 1)
    assert torch.equal(ours, alone)


def test_no_tokens_give_no_rows() -> None:
    linear = make("native", torch.bfloat16).linear([weight("Q4_1", 64, 96)], None)
    assert linear(torch.empty(0, 96)).shape == (0, 64)


def test_rows_in_pairs_order_are_put_back() -> None:
    stored = weight("Q8_0", 96, 64)
    paired = Weight("Q8_0", stored.data, stored.exact, pairs=3)
    x = random(5, 64)
    plain = make("native", torch.float32).linear([stored], None)(x)
    ours = make("native", torch.float32).linear([paired], None)(x)
    for head in range(3):
        for row in range(32):
            stored_at = head * 32 + (2 * row if row < 16 else 2 * (row - 16) + 1)
            assert torch.equal(ours[:, head * 32 + row], plain[:, stored_at])


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_1", "F16"])
def test_embedding_rows_are_the_stored_numbers(encoding: str) -> None:
    stored = weight(encoding, 40, 64)
    ids = torch.tensor([39, 0, 7, 7])
    for name in ("reference", "native"):
        assert torch.equal(make(name, torch.float32).embedding(stored)(ids), stored.exact[ids])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_token_stays_in_its_own_row(bad: float) -> None:
    linear = make("native", torch.bfloat16).linear([weight("Q4_1", 64, 96)], None)
    x = random(9, 96)
    clean = linear(x)
    x[4, 40] = bad
    ours = linear(x)
    assert not ours[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(ours[others], clean[others])


def test_zeros_and_tiny_numbers_come_through() -> None:
    stored = weight("Q4_1", 64, 96)
    linear = make("native", torch.bfloat16).linear([stored], None)
    x = torch.zeros(3, 96)
    x[1, 32:64] = 1e-36
    x[2, :] = 1e-20
    ours = linear(x)
    assert (ours[0] == 0).all()
    assert ours.isfinite().all()
    expected = x[2].double() @ stored.exact.double().T
    torch.testing.assert_close(ours[2].double(), expected, rtol=1e-3, atol=1e-24)


# ------------------------------------------------------------------ choice and build


def test_native_code_is_chosen_where_it_was_built() -> None:
    native = not isinstance(select("cpu"), TorchOps)
    assert native == library_path().exists()
    assert isinstance(select("cpu", native=False), TorchOps)
    assert isinstance(select("meta"), TorchOps)
    assert isinstance(select("cpu", columns=(64, 40)), TorchOps)


def test_a_library_that_cannot_be_loaded_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "native.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(ops, "library_path", lambda: broken)
    with caplog.at_level(logging.WARNING, "skerry.kernels"):
        chosen = select("cpu", torch.bfloat16)
    assert isinstance(chosen, TorchOps)
    assert chosen.dtype == torch.bfloat16
    assert len(caplog.records) == 1
    assert "cannot be loaded" in caplog.text


def test_reference_uses_blocks_of_4_bits_where_they_fit() -> None:
    chosen = TorchOps(torch.bfloat16)
    assert not isinstance(chosen.linear([weight("Q4_0", 64, 64)], None), Dense)
    bias = torch.ones(64, dtype=torch.bfloat16)
    assert isinstance(chosen.linear([weight("Q4_0", 64, 64)], bias), Dense)
    assert isinstance(chosen.linear([weight("Q8_0", 64, 64)], None), Dense)


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
