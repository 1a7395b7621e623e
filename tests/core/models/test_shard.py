"""The weights that ranks keep, put together again: the file's, in every encoding and family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.models.parallel import shard
from core.models.quantised import Encoding, StoredTensor
from core.models.shard import ShardedSource, cut, times
from core.models.weights import WeightSource, open_weights
from core.parallel import Plan
from tests.core.models.families import VARIANTS, family_folder
from tests.core.models.tiny import Config, random_state, tiny_config, write_folder, write_gguf

HEADS: Config = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def sharded(source: WeightSource, plan: Plan) -> list[ShardedSource]:
    return [ShardedSource(source, shard(plan, rank, source.config)) for rank in range(plan.tp)]


def numbers(parts: list[ShardedSource], name: str, axis: int | None) -> Tensor:
    """Of all ranks, put together along `axis`; None: they are the same on all."""
    read = [part.read(name).numbers(torch.float32) for part in parts]
    if axis is None:
        assert all(torch.equal(one, read[0]) for one in read)
        return read[0]
    return torch.cat(read, axis)


@pytest.mark.parametrize("encoding", ["F32", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_gguf_is_put_together_again(encoding: str, tp: int, tmp_path: Path) -> None:
    """320 columns in 10 blocks for 3 ranks: 3, 3 and 4 of them. q and k rows lie in pairs order."""
    changes = HEADS | {"intermediate_size": 320, "num_key_value_heads": tp}
    config = tiny_config(**changes)
    path = write_gguf(tmp_path / "m.gguf", config, random_state(config), encoding)
    source = open_weights(path)
    parts = sharded(source, Plan(tp=tp))
    for name, axis in (
        ("self_attn.q_proj", 0), ("self_attn.k_proj", 0), ("self_attn.v_proj", 0),
        ("self_attn.o_proj", 1), ("mlp.gate_proj", 0), ("mlp.up_proj", 0), ("mlp.down_proj", 1),
        ("input_layernorm", None),
    ):  # fmt: skip
        full = f"model.layers.1.{name}.weight"
        assert torch.equal(numbers(parts, full, axis), source.read(full).numbers(torch.float32))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(numbers(parts, name, 0), source.read(name).numbers(torch.float32))
    widths = {part.read("model.layers.0.mlp.down_proj.weight").columns % 32 for part in parts}
    assert widths == {0}
    source.close()


def test_shards_are_views_of_the_file(tmp_path: Path) -> None:
    config = tiny_config(**HEADS, intermediate_size=192)
    path = write_gguf(tmp_path / "m.gguf", config, random_state(config), "Q4_1")
    source = open_weights(path)
    (_, last) = sharded(source, Plan(tp=2))
    for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.gate_proj"):
        whole = source.read(f"model.layers.0.{name}.weight").data
        part = last.read(f"model.layers.0.{name}.weight").data
        ends = whole.data_ptr() + whole.nbytes
        assert whole.data_ptr() < part.data_ptr() < ends


def test_a_cut_through_a_block_takes_the_numbers() -> None:
    """16 columns of heads that are narrower than a block of 32."""
    values = torch.arange(4 * 64, dtype=torch.uint8).view(torch.uint8)
    scale = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    blocks = torch.cat([torch.cat((scale, values[n * 32 : (n + 1) * 32])) for n in range(8)])
    stored = StoredTensor(Encoding.Q8_0, (4, 64), blocks.view(4, 68))
    part = cut(stored, 1, range(16, 48))
    expected = stored.numbers(torch.float32)[:, 16:48]
    assert torch.equal(part.numbers(torch.float32), expected)
    assert cut(stored, 1, range(32, 64)).encoding == Encoding.Q8_0


def test_a_bias_behind_a_sum_is_added_once(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    source = open_weights(write_folder(tmp_path, config, random_state(config)))
    parts = sharded(source, Plan(tp=2))
    for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
        full = f"model.layers.0.{name}"
        total = sum(part.read(full).numbers(torch.float32) for part in parts)
        assert torch.equal(torch.as_tensor(total), source.read(full).numbers(torch.float32))
    split = numbers(parts, "model.layers.0.self_attn.q_proj.bias", 0)
    whole = source.read("model.layers.0.self_attn.q_proj.bias").numbers(torch.float32)
    assert torch.equal(split, whole)


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_split_by_width_or_kept_whole(ep: int, tmp_path: Path) -> None:
    source = open_weights(family_folder(tmp_path / "m", VARIANTS["deepseek_v3"]))
    parts = sharded(source, Plan(tp=2, ep=ep))
    name = "model.layers.1.mlp.experts.5"
    for part, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        whole = source.read(f"{name}.{part}.weight").numbers(torch.float32)
        put_together = numbers(parts, f"{name}.{part}.weight", axis if ep == 1 else None)
        assert torch.equal(put_together, whole)
        shared = f"model.layers.1.mlp.shared_experts.{part}.weight"
        assert torch.equal(numbers(parts, shared, axis), source.read(shared).numbers(torch.float32))
    assert torch.equal(
        numbers(parts, "model.layers.1.mlp.gate.weight", None),
        source.read("model.layers.1.mlp.gate.weight").numbers(torch.float32),
    )


def test_latents_are_unfolded_by_head(tmp_path: Path) -> None:
    source = open_weights(family_folder(tmp_path / "m", VARIANTS["deepseek_v3"]))
    parts = sharded(source, Plan(tp=4))
    for part, axis in (
        ("q_b_proj", 0), ("kv_b_proj", 0), ("o_proj", 1), ("q_a_proj", None),
        ("kv_a_proj_with_mqa", None),
    ):  # fmt: skip
        name = f"model.layers.2.self_attn.{part}.weight"
        whole = source.read(name).numbers(torch.float32)
        assert torch.equal(numbers(parts, name, axis), whole)


def test_times() -> None:
    assert times(range(2, 5), 16) == range(32, 80)
