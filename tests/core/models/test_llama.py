"""The decoder against transformers on the same weights, and against itself on every path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from core.models.decoder import Decoder
from kernels.layers import HeadAttention
from kernels.linear import Linear
from tests.core.models.tiny import (
    Config,
    forced,
    load,
    prompt,
    random_state,
    row,
    stepper,
    tiny_config,
    transformers_logits,
    write_folder,
    write_gguf,
)

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW: Config = {
    "model_type": "qwen2",
    "head_dim": 16,
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
VARIANTS: dict[str, Config] = {
    "grouped": {},
    "one_kv_head_each": {"num_key_value_heads": 8},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 32},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "qwen2": {"model_type": "qwen2", "head_dim": 16},
    "window": WINDOW,
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, native: bool, tmp_path: Path) -> None:
    config = tiny_config(**VARIANTS[variant])
    state = random_state(config)
    machine = stepper(load(write_folder(tmp_path, config, state), native=native))
    ids = prompt(150)
    ours = forced(machine, [row(ids, 0, range(10), groups=len(machine.pool.groups))])
    expected = transformers_logits(config, state, ids)
    scale = max(1.0, float(expected.abs().max()) / 10)  # tied heads give logits of 50
    torch.testing.assert_close(ours, expected, atol=TOLERANCE * scale, rtol=0)


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(("encoding", "tolerance"), [("F32", 1e-4), ("F16", 2e-2), ("BF16", 0.3)])
def test_gguf_equals_safetensors(
    kv_heads: int, encoding: str, tolerance: float, tmp_path: Path
) -> None:  # B17
    config = tiny_config(num_key_value_heads=kv_heads)
    state = random_state(config)
    ids = prompt(64)
    plain = load(write_folder(tmp_path / "folder", config, state))
    other = load(write_gguf(tmp_path / "model.gguf", config, state, encoding))
    q_and_k = (8 + kv_heads) * 16
    torch.testing.assert_close(  # layer 0, rows of q and k
        qkv(other, 0)(torch.eye(128))[:, :q_and_k],
        qkv(plain, 0)(torch.eye(128))[:, :q_and_k],
        atol=tolerance,
        rtol=0,
    )
    torch.testing.assert_close(
        forced(stepper(other), [row(ids, 0, range(4))]),
        forced(stepper(plain), [row(ids, 0, range(4))]),
        atol=tolerance,
        rtol=0,
    )


def test_qwen2_gguf_keeps_its_row_order(tmp_path: Path) -> None:  # B17
    config = tiny_config(model_type="qwen2")
    state = random_state(config)
    ids = prompt(40)
    machine = stepper(load(write_gguf(tmp_path / "model.gguf", config, state)))
    torch.testing.assert_close(
        forced(machine, [row(ids, 0, range(3))]),
        transformers_logits(config, state, ids),
        atol=TOLERANCE,
        rtol=0,
    )


def test_gguf_biases_of_q_and_k_are_put_back_in_order(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    state = random_state(config)
    plain = load(write_folder(tmp_path / "folder", config, state))
    other = load(write_gguf(tmp_path / "model.gguf", config, state))
    x = torch.randn(3, 128)
    torch.testing.assert_close(qkv(other, 1)(x), qkv(plain, 1)(x))


def test_gguf_rope_divisors_equal_llama3_scaling(tmp_path: Path) -> None:
    config = tiny_config(rope_parameters=LLAMA3)
    state = random_state(config)
    scaled = load(write_folder(tmp_path / "folder", config, state))
    plain = torch.tensor([10000.0 ** (-i / 8) for i in range(8)])
    state["rope_freqs.weight"] = plain / scaled.shape.inverse_frequencies
    other = load(write_gguf(tmp_path / "model.gguf", config, state))
    torch.testing.assert_close(other.shape.inverse_frequencies, scaled.shape.inverse_frequencies)
    assert not torch.allclose(scaled.shape.inverse_frequencies, plain)


def test_shards_with_an_index_equal_one_file(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    one = load(write_folder(tmp_path / "one", config, state))
    three = load(write_folder(tmp_path / "three", config, state, shards=3))
    ids = prompt(20)
    assert torch.equal(
        forced(stepper(one), [row(ids, 0, range(2))]),
        forced(stepper(three), [row(ids, 0, range(2))]),
    )


def test_chunked_prefill_equals_whole(tmp_path: Path) -> None:
    machine = stepper(load(_folder(tmp_path)))
    ids = prompt(100)
    whole = forced(machine, [row(ids, 0, range(7))])
    for sizes in ((1,) * 5 + (95,), (16, 16, 68), (33, 1, 66), (99, 1)):
        other = stepper(machine.decoder)
        table = [40, 3, 17, 5, 60, 1, 22]
        start, parts = 0, []
        for size in sizes:
            parts.append(forced(other, [row(ids[start : start + size], start, table)]))
            start += size
        torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE, rtol=0)


def test_mixed_batch_equals_one_by_one(tmp_path: Path) -> None:
    """Decode rows of ragged contexts beside prefill chunks that begin anywhere."""
    decoder = load(_folder(tmp_path))
    shapes = [(1, 0), (1, 16), (1, 77), (1, 15), (5, 0), (33, 16), (64, 31)]  # (new, before)
    single, mixed = stepper(decoder, 128), stepper(decoder, 128)
    rows, expected, free = [], [], iter(torch.randperm(128).tolist())
    for seed, (new, before) in enumerate(shapes):
        ids = prompt(before + new, seed)
        table = [next(free) for _ in range(-(-(before + new) // 16))]
        whole = forced(single, [row(ids, 0, table)])
        if before:
            forced(mixed, [row(ids[:before], 0, table)])
        rows.append(row(ids[before:], before, table))
        expected.append(whole[before:])
    torch.testing.assert_close(forced(mixed, rows), torch.cat(expected), atol=TOLERANCE, rtol=0)


def test_cached_prefix_equals_uncached(tmp_path: Path) -> None:  # B15
    machine = stepper(load(_folder(tmp_path)))
    for length in (15, 16, 17, 32, 33):
        ids = prompt(length + 3, length)
        whole = forced(machine, [row(ids, 0, (9, 8, 7))])
        cached = (length - 1) // 16 * 16
        again = forced(machine, [row(ids[cached:], cached, (9, 8, 7))])
        torch.testing.assert_close(again, whole[cached:], atol=TOLERANCE, rtol=0)


def test_kv_moved_to_other_blocks_gives_the_same(tmp_path: Path) -> None:
    decoder = load(_folder(tmp_path))
    here, there = stepper(decoder), stepper(decoder)
    ids = prompt(50)
    last = forced(here, [row(ids, 0, (1, 2, 3, 4))])[-1:]
    for source, target in ((1, 50), (2, 0), (3, 31), (4, 7)):
        there.pool.groups[0][target] = here.pool.groups[0][source]
    moved = forced(there, [row(ids[-1:], 49, (50, 0, 31, 7))])
    torch.testing.assert_close(moved, last, atol=TOLERANCE, rtol=0)


def test_strangers_blocks_are_never_read(tmp_path: Path) -> None:
    """B13: what a poisoned sequence left behind reaches nobody."""
    decoder = load(_folder(tmp_path))
    clean, dirty = stepper(decoder), stepper(decoder)
    dirty.pool.groups[0].fill_(float("nan"))
    rows = []
    for name, (length, table) in enumerate([(5, (3,)), (40, (9, 4, 30)), (17, (11, 12))]):
        ids = prompt(length, name)
        for machine in (clean, dirty):
            forced(machine, [row(ids, 0, table)])
        rows.append(row([1], length, table))
    rows.append(row(prompt(20), 0, (50, 51)))
    ours = forced(dirty, rows)
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, forced(clean, rows))


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    ids = prompt(60)
    exact = forced(stepper(load(folder)), [row(ids, 0, range(4))])
    rough = forced(stepper(load(folder, torch.bfloat16)), [row(ids, 0, range(4))])
    error = (rough - exact).abs().mean() / exact.abs().mean()
    assert error < 0.03


def test_missing_or_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config()
    state = random_state(config)
    lost = {name: value for name, value in state.items() if "layers.1.mlp.up" not in name}
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
        load(write_folder(tmp_path / "lost", config, lost))
    wrong = state | {"model.norm.weight": torch.ones(127)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*127.*128"):
        load(write_folder(tmp_path / "wrong", config, wrong))


def test_decoder_gives_no_logits_when_none_are_wanted(tmp_path: Path) -> None:
    machine = stepper(load(_folder(tmp_path)))
    assert machine.logits([row([1, 2, 3], 0, (0,), None)]).shape == (0, 320)
    two = machine.logits([row([4], 3, (0,)), replace(row([5, 6], 0, (1,)), sample=None)])
    assert two.shape == (1, 320)


def qkv(decoder: Decoder, layer: int) -> Linear:
    attention = decoder.layers[layer].attention
    assert isinstance(attention, HeadAttention)
    return attention.qkv


def _folder(path: Path) -> Path:
    config = tiny_config()
    return write_folder(path / "folder", config, random_state(config))
