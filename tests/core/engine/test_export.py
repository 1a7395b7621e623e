"""A model in, a folder out that says the same: numbers, shape, text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from core.engine.export import main
from core.models.weights import open_weights
from core.text.model import load_text
from core.types import Message
from tests import tiny_text
from tests.core.models.families import DEEPSEEK, QWEN3, YARN, family_state, scaled
from tests.core.models.tiny import (
    Config,
    State,
    gguf_name,
    permuted,
    random_state,
    tiny_config,
    write_folder,
)
from tests.tiny_gguf import Value, write_gguf

VOCABULARY = tiny_text.VOCAB_SIZE


def as_folder(tmp_path: Path, config: Config, state: State) -> Path:
    folder = tiny_text.write_tiny_folder(tmp_path / "in")
    return write_folder(folder, config | {"eos_token_id": [tiny_text.IM_END_ID]}, state)


def as_gguf(tmp_path: Path, config: Config, state: State) -> Path:
    merges = list(tiny_text.MERGES)
    letters = tiny_text.byte_letters()
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *tiny_text.SPECIALS]
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "llama.embedding_length": 128,
        "llama.block_count": 3,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.feed_forward_length": 192,
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3,
        "tokenizer.ggml.bos_token_id": tiny_text.IM_START_ID,
        "tokenizer.ggml.eos_token_id": tiny_text.IM_END_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tiny_text.CHATML,
    }
    tensors = {}
    for name, tensor in state.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, 8 if "q_proj" in name else 2)
        tensors[gguf_name(name)] = (tuple(tensor.shape), 0, tensor.numpy().tobytes())
    return write_gguf(tmp_path / "in.gguf", metadata, tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("write", [as_folder, as_gguf])
def test_the_folder_says_what_the_model_said(tmp_path: Path, tied: bool, write: object) -> None:
    config = tiny_config(vocab_size=VOCABULARY, tie_word_embeddings=tied)
    state = random_state(config)
    assert callable(write)
    source = write(tmp_path, config, state)
    folder = tmp_path / "out"
    assert main([str(source), str(folder)]) == 0

    before, after = open_weights(source), open_weights(folder)
    assert after.names == before.names
    for name, tensor in state.items():
        assert torch.equal(after.read(name).numbers(torch.bfloat16), tensor.bfloat16()), name
    shape = ("heads", "kv_heads", "head_dim", "layers", "tied", "norm_eps", "rope_theta")
    for field in shape:
        assert getattr(after.config, field) == pytest.approx(getattr(before.config, field))

    text, same = load_text(source), load_text(folder)
    chat = [Message(role="user", content="the quiet <|im_end|> willow é")]
    assert same.encode_chat(chat, rendered_at=0) == text.encode_chat(chat, rendered_at=0)
    assert tiny_text.IM_END_ID in same.end_ids


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(vocab_size=VOCABULARY)
    state = random_state(config)
    folder = tmp_path / "out"
    assert main([str(as_gguf(tmp_path, config, state)), str(folder)]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.bfloat16(), state[name].bfloat16()), name


def test_a_model_with_biases_and_scaled_rotation(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = tiny_config(model_type="qwen2", vocab_size=VOCABULARY, rope_scaling=scaling)
    source = as_folder(tmp_path, config, random_state(config))
    assert main([str(source), str(tmp_path / "out")]) == 0
    assert open_weights(tmp_path / "out").config == open_weights(source).config


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_text.write_tiny_folder(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "mamba" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [(DEEPSEEK, "'deepseek_v3' is not exported"), (scaled(QWEN3, YARN), "other than linear")],
)
def test_what_cannot_be_written_is_refused(
    config: Config, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config | {"vocab_size": VOCABULARY}
    source = as_folder(tmp_path, config, family_state(config))
    assert main([str(source), str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_norms_of_heads_are_exported(tmp_path: Path) -> None:
    config = QWEN3 | {"vocab_size": VOCABULARY}
    source = as_folder(tmp_path, config, family_state(config))
    assert main([str(source), str(tmp_path / "out")]) == 0
    assert open_weights(tmp_path / "out").config == open_weights(source).config
