"""Small random models, written in both containers, and their twin in transformers."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from core.engine import batch
from core.engine.plan import Row, SampleSpec, SequenceId
from core.engine.stepper import Stepper, kv_geometry, layers_of
from core.models.builder import build
from core.models.decoder import Decoder
from core.models.weights import open_weights
from kernels.ops import select

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State = dict[str, Tensor]
Config = dict[str, object]

GREEDY = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)


def tiny_config(**changes: object) -> Config:
    """Eight query heads of 16 on two KV heads (B17)."""
    return {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
    } | changes


def random_state(config: Config, seed: int = 7) -> State:
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=random) * (1.5 / columns**0.5)
        return values

    def size(name: str) -> int:
        value = config[name]
        assert isinstance(value, int)
        return value

    hidden, wide = size("hidden_size"), size("intermediate_size")
    q, kv = (size(f"num_{n}_heads") * size("head_dim") for n in ("attention", "key_value"))
    state = {"model.embed_tokens.weight": torch.randn(size("vocab_size"), hidden, generator=random)}
    qkv_bias = config["attention_bias"] or config["model_type"] == "qwen2"
    for index in range(size("num_hidden_layers")):
        layer = f"model.layers.{index}"
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", wide, hidden),
            ("mlp.up_proj", wide, hidden),
            ("mlp.down_proj", hidden, wide),
        ):
            state[f"{layer}.{name}.weight"] = matrix(rows, columns)
            attention = name.startswith("self_attn")
            has_bias = qkv_bias if attention else config.get("mlp_bias", False)
            if has_bias and not (name.endswith("o_proj") and config["model_type"] == "qwen2"):
                state[f"{layer}.{name}.bias"] = torch.randn(rows, generator=random) * 0.1
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
    state["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
    if not config["tie_word_embeddings"]:
        state["lm_head.weight"] = matrix(size("vocab_size"), hidden)
    return state


def write_folder(folder: Path, config: Config, state: State, *, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# ------------------------------------------------------------------ GGUF

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES.get(stem, stem)}.{kind}"


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """Rows as llama's converter writes them: half-split pairs become neighbours."""
    rows = tensor.shape[0]
    return tensor.view(heads, 2, rows // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    config: Config,
    state: State,
    encoding: str = "F32",
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Matrices in `encoding`, vectors in F32, q and k rows permuted for llama."""
    family = str(config["model_type"])
    keys = {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position_embeddings",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
    metadata = {f"{family}.{key}": config[name] for key, name in keys.items()}
    metadata = {"general.architecture": family} | metadata | dict(extra or {})
    kind = gguf.GGMLQuantizationType[encoding]
    tensors: list[tuple[str, Sequence[int], int, bytes]] = []
    for name, tensor in state.items():
        if family == "llama" and "q_proj" in name:
            tensor = permuted(tensor, int(str(config["num_attention_heads"])))
        elif family == "llama" and "k_proj" in name:
            tensor = permuted(tensor, int(str(config["num_key_value_heads"])))
        own = kind if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        raw = gguf.quants.quantize(tensor.numpy(), own).tobytes()
        tensors.append((gguf_name(name), tuple(tensor.shape)[::-1], int(own), raw))
    path.write_bytes(_container(metadata, tensors))
    return path


def _container(
    metadata: Mapping[str, object], tensors: Sequence[tuple[str, Sequence[int], int, bytes]]
) -> bytes:
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _text(key)
        if isinstance(value, str):
            head += struct.pack("<I", 8) + _text(value)
        elif isinstance(value, int):
            head += struct.pack("<II", 4, value)
        else:
            assert isinstance(value, float)
            head += struct.pack("<If", 6, value)
    body = bytearray()
    for name, shape, kind, raw in tensors:
        head += _text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, len(body))
        body += raw + bytes(-len(raw) % 32)
    return bytes(head) + bytes(-len(head) % 32) + bytes(body)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


# ------------------------------------------------------------------ running


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    native: bool = True,
    threads: int = 1,
    context: int | None = None,
) -> Decoder:
    source = open_weights(path, context)
    decoder = build(source, ops=select("cpu", dtype, native=native, threads=threads))
    source.close()
    return decoder


def stepper(decoder: Decoder, blocks: int = 64) -> Stepper:
    dtype = str(decoder.ops.dtype).removeprefix("torch.")
    geometry = kv_geometry(decoder.config, dtype, blocks)
    return Stepper(decoder, geometry, mmap.mmap(-1, geometry.pool_bytes))


def row(
    ids: Sequence[int], start: int, table: Sequence[int], sample: SampleSpec | None = GREEDY,
    name: str = "s", groups: int = 1,
) -> Row:  # fmt: skip
    """The same block ids in each of the KV groups."""
    return Row(SequenceId(name), tuple(ids), start, (tuple(table),) * groups, sample)


def forced(machine: Stepper, rows: Sequence[Row]) -> Tensor:
    """Logits of every token of `rows` (ordered as they are), teacher-forced."""
    plan = batch.build(rows)
    plan = replace(plan, sampled=torch.arange(len(plan.tokens)))
    with torch.inference_mode():
        return machine.decoder.forward(plan, layers_of(machine.pool, machine.decoder.config))


def prompt(length: int, seed: int = 3, vocabulary: int = 320) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, vocabulary, length).tolist()
    return found


def transformers_logits(config: Config, state: State, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = transformers_model(config, state)(torch.tensor([list(ids)])).logits[0]
    return logits.float()


def transformers_model(config: Config, state: State) -> PreTrainedModel:
    """The same weights in Hugging Face's own model."""
    import transformers

    kind = {"llama": "Llama", "qwen2": "Qwen2"}[str(config["model_type"])]
    settings = getattr(transformers, f"{kind}Config")(**config)
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model
