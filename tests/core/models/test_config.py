from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.models.config import ModelConfig, from_gguf, from_json
from tests.core.models.tiny import tiny_config

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
        ({"model_type": "mamba"}, r"'mamba' is not supported; known: llama, qwen2"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn'"),
        ({"num_key_value_heads": 3}, "8 query heads for 3 KV heads"),
        ({"head_dim": 15}, "odd"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding window is 0"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["chunked"]},
            "layer_types",
        ),
    ],
)
def test_json_that_cannot_be_computed_is_refused_by_name(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path, **changes)


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
