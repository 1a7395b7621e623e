"""Kernels are launched ahead for what a family has: heads or latents, norms, windows, experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.models.config_json import from_json
from tests.core.models.families import VARIANTS, family_folder

pytest.importorskip("triton", reason="triton is there for Linux on x86-64 only")

from core.engine.gpu.rehearsal import rehearse, sizes_of
from kernels.triton import rehearse as launched
from kernels.triton.rehearse import Sizes
from tests.kernels.triton.cases import DEVICE

WINDOW = "qwen3, biases, tied, window"


def sizes(name: str, path: Path) -> Sizes:
    return sizes_of(from_json(family_folder(path, VARIANTS[name]) / "config.json"))


def test_sizes_of_each_family(tmp_path: Path) -> None:
    dense = sizes("qwen3", tmp_path / "a")
    assert (dense.widths, dense.experts, dense.normed, dense.rank) == ((96,), None, True, 0)
    mixed = sizes("qwen3_moe", tmp_path / "b")
    assert (mixed.widths, mixed.experts) == ((96,), (8, 32))
    latent = sizes("deepseek_v3", tmp_path / "c")
    assert (latent.rank, latent.rotary_dim, latent.widths) == (32, 8, (64, 96))
    assert sizes(WINDOW, tmp_path / "d").windows == (None, 40)


COMMON = {"rms_norm", "add_rms_norm", "rotate", "silu_mul", "draw"}
KERNELS = {
    "llama3": {"decode_attention", "prefill_attention", "write_kv"},
    WINDOW: {"decode_attention", "prefill_attention", "write_kv"},
    "qwen3_moe": {"decode_attention", "prefill_attention", "write_kv", "grouped_matmul"},
    "deepseek_v3": {"latent_decode_attention", "write_latents", "grouped_matmul"},
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_a_family_is_launched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def noted(name: str) -> Callable[..., object]:
        original = getattr(launched, name)

        def launch(*given: object, **more: object) -> object:
            seen.add(name)
            return original(*given, **more)

        return launch

    for kernel in COMMON.union(*KERNELS.values()):
        monkeypatch.setattr(launched, kernel, noted(kernel))
    model = from_json(family_folder(tmp_path, VARIANTS[name]) / "config.json")
    rehearse(model, torch.float16, torch.device(DEVICE))
    assert seen == KERNELS[name] | COMMON
