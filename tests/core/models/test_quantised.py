"""Decoding against the gguf package, which is used nowhere else."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

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
