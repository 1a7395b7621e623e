"""`python -m core.engine.export MODEL FOLDER`: a model as a Hugging Face folder in bf16.

What other engines read: config.json, model.safetensors, tokenizer.json, tokenizer_config.json.
Stored 4- and 8-bit blocks become the numbers that they stand for, rounded once to bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.weights import WeightSource, open_weights
from core.text import from_folder, from_gguf
from core.text.parts import TextParts

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ITEM_BYTES = 2
_ALIGN = 8


def export(source: Path, folder: Path) -> None:
    """Write the folder; whole or not at all where its weights are concerned. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    read = from_folder.read_text_parts if source.is_dir() else from_gguf.read_text_parts
    text = read(source)
    weights = open_weights(source)
    try:
        config = json.dumps(hf_config(weights.config, text), indent=2)
        (folder / "config.json").write_text(config, encoding="utf-8")
        text.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(_tokenizer_config(text), indent=2), encoding="utf-8"
        )
        _write_weights(weights, folder / "model.safetensors")
    finally:
        weights.close()


def hf_config(model: ModelConfig, text: TextParts) -> dict[str, object]:
    """config.json. Raises ConfigError for what it cannot say or we do not write."""
    if model.rope_stored:
        raise ConfigError("rotary divisors stored as a tensor have no place in config.json")
    scaling = model.rope_scaling
    if model.family not in _CLASSES:
        raise ConfigError(
            f"architecture {model.family!r} is not exported; known: {', '.join(_CLASSES)}"
        )
    if model.windowed or (scaling is not None and scaling.kind not in ("linear", "llama3")):
        raise ConfigError(
            "windows, and rope scaling other than linear and llama3, are not exported"
        )
    config: dict[str, object] = {
        "architectures": [_CLASSES[model.family]],
        "model_type": model.family,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "attention_bias": model.qkv_bias and model.family != "qwen2",
        "mlp_bias": model.mlp_bias,
        "bos_token_id": text.begin_id,
        "eos_token_id": sorted(text.end_ids) or None,
    }
    if scaling is not None:
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor} | (
            {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
            if scaling.kind == "llama3"
            else {}
        )
    return config


def _tokenizer_config(text: TextParts) -> dict[str, object]:
    own: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": text.context,
        "add_bos_token": text.add_begin,
        **text.names,
    }
    if text.template is not None:
        own["chat_template"] = text.template
    return own


def _write_weights(weights: WeightSource, path: Path) -> None:
    names = sorted(weights.names)
    if weights.config.tied:  # a copy of the embedding would be read as another matrix
        names = [name for name in names if name != "lm_head.weight"]
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        stored = weights.read(name)
        size = _ITEM_BYTES * stored.data.shape[0] * stored.columns
        entries[name] = {
            "dtype": "BF16",
            "shape": list(stored.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGN)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            file.write(weights.read(name).numbers(torch.bfloat16).view(torch.int16).numpy().data)
    unfinished.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file or a folder of safetensors")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        export(options.model, options.folder)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"export: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
