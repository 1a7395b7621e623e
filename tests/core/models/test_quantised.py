"""Decoding against the gguf package, which is used nowhere else."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from core.errors import ConfigError
from core.models.quantised import Encoding, StoredTensor
from kernels.linear import nibbles


def stored(
    encoding: Encoding, rows: int = 37, columns: int = 512
) -> tuple[StoredTensor, torch.Tensor]:
    """Random weights in `encoding`, and what the gguf package makes of the same bytes."""
    random = np.random.default_rng(5)
    kind = gguf.GGMLQuantizationType[encoding.value]
    if encoding is Encoding.Q6_K:  # the package only reads it: any bytes with a finite scale do
        raw = random.integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
        scales = random.normal(size=(rows, columns // 256, 1)).astype(np.float16)
        raw[:, :, 208:] = scales.view(np.uint8)
        raw = raw.reshape(rows, -1)
    else:
        values = random.normal(size=(rows, columns)).astype(np.float32)
        raw = gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    expected = gguf.quants.dequantize(raw, kind).reshape(rows, columns)
    data = torch.from_numpy(raw.copy())
    return StoredTensor(encoding, (rows, columns), data), torch.from_numpy(expected.copy())


@pytest.mark.parametrize("encoding", list(Encoding))
def test_decoded_numbers_equal_the_reference(encoding: Encoding) -> None:
    tensor, expected = stored(encoding)
    assert torch.equal(tensor.numbers(torch.float32), expected.float())
    assert torch.equal(tensor.numbers(torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1])
def test_nibbles_scales_and_zeros_make_the_same_numbers(encoding: Encoding) -> None:
    tensor, expected = stored(encoding)
    values, scales, zeros = nibbles(encoding, tensor.data)
    grouped = values.view(37, -1, 32).float() * scales.unsqueeze(-1) + zeros.unsqueeze(-1)
    torch.testing.assert_close(grouped.view(37, -1), expected)


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.Q4_0, Encoding.Q8_0])
def test_rows_are_put_back_in_order_without_decoding(encoding: Encoding) -> None:
    tensor, expected = stored(encoding, rows=48)
    ordered = replace(tensor, pairs=3).numbers(torch.float32)
    for head in range(3):
        for row in range(16):
            stored_at = head * 16 + (2 * row if row < 8 else 2 * (row - 8) + 1)
            assert torch.equal(ordered[head * 16 + row], expected[stored_at])


def test_decoding_in_tiles_equals_decoding_at_once() -> None:
    tensor, expected = stored(Encoding.Q4_1, rows=1100)
    assert torch.equal(tensor.numbers(torch.float32), expected)


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_a_part_is_a_view_and_has_the_same_numbers(encoding: str) -> None:
    whole, numbers = stored(Encoding(encoding), 24, 96)
    for axis, first, last in ((0, 5, 17), (0, 0, 24), (1, 32, 96), (0, 7, 7)):
        part = whole.narrow(axis, first, last)
        assert torch.equal(part.numbers(torch.float32), numbers.narrow(axis, first, last - first))
        assert part.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
    both = whole.narrow(1, 64, 96).narrow(0, 3, 9)
    assert torch.equal(both.numbers(torch.float32), numbers[3:9, 64:96])


def test_parts_of_vectors_and_of_rows_in_pairs_order() -> None:
    vector = StoredTensor(Encoding.F32, (6,), torch.arange(6.0).view(torch.uint8).view(1, -1))
    assert vector.narrow(0, 2, 5).numbers(torch.float32).tolist() == [2, 3, 4]
    assert vector.take(torch.tensor([5, 0])).numbers(torch.float32).tolist() == [5, 0]
    heads = replace(stored(Encoding.F16, 24, 32)[0], pairs=3)
    numbers = heads.numbers(torch.float32)
    assert torch.equal(heads.narrow(0, 8, 24).numbers(torch.float32), numbers[8:])
    order = torch.tensor([23, 1, 8])
    assert torch.equal(heads.take(order).numbers(torch.float32), numbers[order])


@pytest.mark.parametrize(
    ("encoding", "pairs", "axis", "first", "last", "complaint"),
    [
        ("Q8_0", 0, 1, 16, 64, "cut blocks of 32"),
        ("F16", 3, 0, 4, 24, "cut heads of 8"),
        ("F32", 0, 0, 5, 25, "is no part of axis 0"),
        ("F32", 0, 1, 9, 8, "is no part of axis 1"),
    ],
)
def test_parts_that_cannot_be_cut_are_refused(
    encoding: str, pairs: int, axis: int, first: int, last: int, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(stored(Encoding(encoding), 24, 64)[0], pairs=pairs).narrow(axis, first, last)
