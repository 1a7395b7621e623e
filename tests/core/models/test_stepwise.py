"""Where partial sums of a layer are joined, and that native steps are the native call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.models.decoder import Decoder
from kernels.cpu.native import NativeLayers, NativeOps
from kernels.cpu.steps import NativeSteps
from kernels.layers import Shape
from tests.core.models.families import FAMILIES, LLAMA, family_folder
from tests.core.models.tiny import forced, load, prompt, row, stepper


def with_shape(decoder: Decoder, shape: Shape) -> Decoder:
    return Decoder(
        config=decoder.config,
        ops=decoder.ops,
        embedding=decoder.embedding,
        layers=decoder.layers,
        shape=shape,
        norm=decoder.norm,
        head=decoder.head,
    )


def logits(decoder: Decoder) -> Tensor:
    return forced(stepper(decoder), [row(prompt(40), 0, range(3))])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_mlp_are_reduced_once_each(family: str, native: bool, tmp_path: Path) -> None:
    """Halves that a reduction doubles are the whole; what it is given is one update a call."""
    decoder = load(family_folder(tmp_path, FAMILIES[family]), native=native)
    seen: list[Tensor] = []

    def reduce(update: Tensor) -> Tensor:
        seen.append(update.clone())
        return torch.zeros_like(update)

    nothing = logits(with_shape(decoder, replace(decoder.shape, reduce=reduce)))
    assert len(seen) == 2 * decoder.config.layers
    assert all(update.shape == (40, decoder.config.hidden) for update in seen)
    ids = torch.tensor(prompt(40))
    x = decoder.ops.rms_norm(decoder.embedding(ids), decoder.norm, decoder.config.norm_eps)
    torch.testing.assert_close(nothing, decoder.head(x).float())
    assert (logits(decoder) - nothing).abs().max() > 0.1


def test_native_steps_are_the_native_call_bit_for_bit(tmp_path: Path) -> None:
    """So that a model on several ranks, which must step, and one on a single rank agree."""
    decoder = load(family_folder(tmp_path, LLAMA), torch.bfloat16)
    if not isinstance(decoder.ops, NativeOps):
        pytest.skip("native kernels are not built")
    shape = replace(decoder.shape, reduce=lambda update: update)
    assert isinstance(decoder.ops.layers(decoder.layers, decoder.shape), NativeLayers)
    assert isinstance(decoder.ops.layers(decoder.layers, shape), NativeSteps)
    assert torch.equal(logits(with_shape(decoder, shape)), logits(decoder))
