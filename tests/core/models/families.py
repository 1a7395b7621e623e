"""Small random models of every family, as folders, and what transformers makes of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.core.models.tiny import Config, State, write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE: Config = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
LLAMA: Config = BASE | {"model_type": "llama"}
QWEN3: Config = BASE | {"model_type": "qwen3"}
QWEN3_MOE: Config = BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
DEEPSEEK: Config = {name: value for name, value in BASE.items() if name != "head_dim"} | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def scaled(config: Config, scaling: Config) -> Config:
    return config | {"rope_scaling": scaling}


VARIANTS: dict[str, Config] = {
    "llama3": scaled(LLAMA, LLAMA3),
    "linear": scaled(LLAMA, {"type": "linear", "factor": 4.0}),
    "yarn": scaled(LLAMA, YARN),
    "yarn, attention factor": scaled(LLAMA, YARN | {"attention_factor": 0.7, "truncate": False}),
    "dynamic, not stretched": scaled(LLAMA, {"type": "dynamic", "factor": 4.0}),
    "qwen3": QWEN3,
    "qwen3, biases, tied, window": QWEN3
    | {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3, yarn": scaled(QWEN3, YARN),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe, plain weights": QWEN3_MOE
    | {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    "deepseek_v3": scaled(DEEPSEEK, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "deepseek_v3, plain": DEEPSEEK
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "deepseek_v3, yarn weights": scaled(DEEPSEEK, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "deepseek_v3, halves, biases": DEEPSEEK | {"rope_interleave": False, "attention_bias": True},
}
"""What each family can be, for the comparison with transformers."""
FAMILIES: dict[str, Config] = {
    name: VARIANTS[name] for name in ("llama3", "yarn", "qwen3", "qwen3_moe", "deepseek_v3")
}
"""One of each kind, for the equalities."""


class _Maker:
    """Random numbers under Hugging Face's names on disk, in the sizes that a config gives."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._random = torch.Generator().manual_seed(seed)
        self.state: State = {}

    def size(self, name: str) -> int:
        value = self._config.get(name)
        return value if isinstance(value, int) else 0

    def matrix(self, name: str, rows: int, columns: int) -> None:
        values = torch.randn(rows, columns, generator=self._random) * (1.5 / columns**0.5)
        self.state[f"{name}.weight"] = values

    def norm(self, name: str, size: int) -> None:
        self.state[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=self._random)

    def bias(self, name: str, size: int) -> None:
        if self._config["attention_bias"]:
            self.state[f"{name}.bias"] = torch.randn(size, generator=self._random) * 0.1

    def gated(self, name: str, width: int) -> None:
        hidden = self.size("hidden_size")
        self.matrix(f"{name}.gate_proj", width, hidden)
        self.matrix(f"{name}.up_proj", width, hidden)
        self.matrix(f"{name}.down_proj", hidden, width)

    def experts(self, name: str, count: int) -> None:
        self.matrix(f"{name}.gate", count, self.size("hidden_size"))
        for expert in range(count):
            self.gated(f"{name}.experts.{expert}", self.size("moe_intermediate_size"))

    def heads(self, name: str) -> None:
        hidden, dim = self.size("hidden_size"), self.size("head_dim")
        q, kv = self.size("num_attention_heads") * dim, self.size("num_key_value_heads") * dim
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            self.matrix(f"{name}.{part}_proj", rows, hidden)
            self.bias(f"{name}.{part}_proj", rows)
        self.matrix(f"{name}.o_proj", hidden, q)
        self.bias(f"{name}.o_proj", hidden)
        if str(self._config["model_type"]).startswith("qwen3"):
            self.norm(f"{name}.q_norm", dim)
            self.norm(f"{name}.k_norm", dim)

    def latent(self, name: str) -> None:
        hidden, heads, rank = (
            self.size(n) for n in ("hidden_size", "num_attention_heads", "kv_lora_rank")
        )
        nope, rope, value, query = (
            self.size(n)
            for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        )
        if query:
            self.matrix(f"{name}.q_a_proj", query, hidden)
            self.bias(f"{name}.q_a_proj", query)
            self.norm(f"{name}.q_a_layernorm", query)
            self.matrix(f"{name}.q_b_proj", heads * (nope + rope), query)
        else:
            self.matrix(f"{name}.q_proj", heads * (nope + rope), hidden)
        self.matrix(f"{name}.kv_a_proj_with_mqa", rank + rope, hidden)
        self.bias(f"{name}.kv_a_proj_with_mqa", rank + rope)
        self.norm(f"{name}.kv_a_layernorm", rank)
        self.matrix(f"{name}.kv_b_proj", heads * (nope + value), rank)
        self.matrix(f"{name}.o_proj", hidden, heads * value)
        self.bias(f"{name}.o_proj", hidden)

    def mlp(self, name: str, index: int) -> None:
        config = self._config
        if config["model_type"] == "qwen3_moe":
            dense = config["mlp_only_layers"]
            assert isinstance(dense, list)
            if index not in dense and (index + 1) % (self.size("decoder_sparse_step") or 1) == 0:
                self.experts(name, self.size("num_experts"))
                return
        elif config["model_type"] == "deepseek_v3" and index >= self.size("first_k_dense_replace"):
            count = self.size("n_routed_experts")
            self.experts(name, count)
            bias = torch.randn(count, generator=self._random) * 0.2
            self.state[f"{name}.gate.e_score_correction_bias"] = bias
            shared = self.size("n_shared_experts") * self.size("moe_intermediate_size")
            self.gated(f"{name}.shared_experts", shared)
            return
        self.gated(name, self.size("intermediate_size"))


def family_state(config: Config, seed: int = 7) -> State:
    maker = _Maker(config, seed)
    hidden, vocabulary = maker.size("hidden_size"), maker.size("vocab_size")
    random = torch.Generator().manual_seed(seed)
    maker.state["model.embed_tokens.weight"] = torch.randn(vocabulary, hidden, generator=random)
    for index in range(maker.size("num_hidden_layers")):
        layer = f"model.layers.{index}"
        maker.norm(f"{layer}.input_layernorm", hidden)
        if config["model_type"] == "deepseek_v3":
            maker.latent(f"{layer}.self_attn")
        else:
            maker.heads(f"{layer}.self_attn")
        maker.norm(f"{layer}.post_attention_layernorm", hidden)
        maker.mlp(f"{layer}.mlp", index)
    maker.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        maker.matrix("lm_head", vocabulary, hidden)
    return maker.state


def family_folder(folder: Path, config: Config, *, shards: int = 2) -> Path:
    """Written as the authors of such models do: several files and an index."""
    return write_folder(folder, config, family_state(config), shards=shards)


@functools.cache
def reference(folder: Path) -> PreTrainedModel:
    """transformers' own reading of `folder`."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
    model.train(False)
    return model


def reference_logits(folder: Path, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(folder)(torch.tensor([list(ids)])).logits[0]
    return logits.float()
