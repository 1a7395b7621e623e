from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.config_gguf import from_gguf
from core.models.config_json import from_json
from tests.core.models.families import BASE, DEEPSEEK, QWEN3_MOE, VARIANTS
from tests.core.models.tiny import Config, tiny_config

GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 96,
    "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 64)}


def read(folder: Path, **changes: object) -> ModelConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(tiny_config(**changes)))
    return from_json(path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model_type": "mamba"},
            r"'mamba' is not supported; known: llama, qwen2, qwen3, qwen3_moe, deepseek_v3",
        ),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "'longrope'.*known: .*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a factor"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
        ({"num_key_value_heads": 3}, "8 query heads for 3 KV heads"),
        ({"head_dim": 15}, "odd"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding window is 0"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["chunked"],
            },
            "layer_types",
        ),
    ],
)
def test_json_that_cannot_be_computed_is_refused_by_name(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, **changes)


MOE: Config = {name: QWEN3_MOE[name] for name in QWEN3_MOE if name not in BASE}
LATENTS: Config = {name: DEEPSEEK[name] for name in DEEPSEEK if name not in BASE}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (MOE | {"num_experts": 0}, "a size below 1"),
        (MOE | {"num_experts_per_tok": 9}, "9 experts a token, but only 8"),
        (MOE | {"use_sliding_window": True}, "sliding window is 0"),
        (LATENTS | {"n_group": 3}, "8 experts in 3 groups"),
        (LATENTS | {"topk_group": 5}, "of which 5 count"),
        (LATENTS | {"num_experts_per_tok": 5}, "5 experts a token, but only 4"),
        (LATENTS | {"kv_lora_rank": 0}, "latent attention has a size below 1"),
        (LATENTS | {"qk_rope_head_dim": 7}, "odd"),
        (LATENTS | {"scoring_func": "softmax"}, "'softmax' and 'noaux_tc'"),
        (LATENTS | {"moe_layer_freq": 2}, "every 2th layer"),
    ],
)
def test_mixtures_and_latents_that_do_not_fit_are_refused(
    changes: Config, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, **changes)


def test_which_layers_are_mixtures(tmp_path: Path) -> None:
    def mixtures(**changes: object) -> tuple[int, ...]:
        moe = read(tmp_path, num_hidden_layers=6, **changes).moe
        assert moe is not None
        return moe.layers

    assert mixtures(**MOE | {"mlp_only_layers": [1, 5]}) == (0, 2, 3, 4)
    assert mixtures(**MOE | {"mlp_only_layers": None, "decoder_sparse_step": 2}) == (1, 3, 5)
    assert mixtures(**LATENTS | {"first_k_dense_replace": 2}) == (2, 3, 4, 5)


def test_latents_are_one_head_whatever_the_file_calls_heads(tmp_path: Path) -> None:
    config = read(tmp_path, **LATENTS)
    assert (config.heads, config.kv_heads, config.kv_shape) == (8, 1, (1, 32 + 8))
    assert (config.head_dim, config.rotary_dim) == (16 + 8, 8)


def test_json_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.kv_heads) == (16, 8)


def test_json_old_and_new_rope_fields_say_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | scaling)
    new = read(
        tmp_path,
        rope_theta=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | scaling,
    )
    assert old == new
    assert old.rope_theta == 5e5


def test_gguf_metadata_becomes_the_same_config() -> None:
    config = from_gguf(GGUF, SHAPES, "m.gguf")
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 2, 8, 320)
    assert config.tied
    assert config.permuted
    assert not from_gguf(GGUF, SHAPES | {"output.weight": (320, 64)}, "m.gguf").tied


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"general.architecture": "gemma"}, "'gemma' is not supported"),
        ({"general.architecture": None}, "names no architecture"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.rope.dimension_count": 4}, "part of the head"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
    ],
)
def test_gguf_that_cannot_be_computed_is_refused_by_name(
    changes: dict[str, object], complaint: str
) -> None:
    metadata = {key: value for key, value in (GGUF | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=complaint):
        from_gguf(metadata, SHAPES, "m.gguf")


def test_gguf_without_an_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"token_embd\.weight"):
        from_gguf(GGUF, {}, "m.gguf")


WEIRD: tuple[object, ...] = (
    None,
    0,
    -1,
    1,
    3,
    1 << 40,
    1.5,
    float("inf"),
    "many",
    [],
    [1],
    {},
    True,
)


@pytest.mark.parametrize(
    "family", ["llama3", "dynamic, not stretched", "qwen3", "qwen3_moe", "deepseek_v3"]
)
def test_any_field_of_any_kind_is_computed_or_refused(family: str, tmp_path: Path) -> None:
    """Nothing but ConfigError, neither at reading nor when frequencies and scales are asked for."""
    path = tmp_path / "config.json"
    whole = VARIANTS[family]
    rope = whole.get("rope_scaling")
    refused = 0
    for field, value in itertools.product(
        (*whole, *(rope if isinstance(rope, dict) else ())), WEIRD
    ):
        changed = whole | {field: value}
        if field not in whole and isinstance(rope, dict):
            changed = whole | {"rope_scaling": rope | {field: value}}
        path.write_text(json.dumps(changed))
        try:
            config = from_json(path)
        except ConfigError:
            refused += 1
            continue
        if max(config.layers, config.head_dim, config.rotary_dim) > 1000:
            continue  # too many to be counted here
        assert all(0 < one < 2 for one in config.inverse_frequencies())
        assert 0 < config.attention_scale < float("inf")
        assert len(config.kv_groups) == config.layers
        assert min(config.columns) > 0
    assert refused > 3 * len(whole)
