"""What a model's own description says, without its weights and without torch."""

from __future__ import annotations

from pathlib import Path

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.config_gguf import from_gguf
from core.models.config_json import from_json
from core.models.gguf import read_gguf
from core.parallel import ModelNumbers, Plan, refusal


def read_config(path: Path) -> ModelConfig:
    """Of a GGUF file or a folder with config.json. Raises ConfigError."""
    if path.is_dir():
        return from_json(path / "config.json")
    file = read_gguf(path)
    try:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        return from_gguf(file.metadata, shapes, str(path))
    finally:
        file.close()


def numbers_of(config: ModelConfig) -> ModelNumbers:
    return ModelNumbers(
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        intermediate=config.intermediate,
        vocab_size=config.vocab_size,
        experts=config.moe.count if config.moe else 0,
        latent=config.latent is not None,
    )


def check_plan(plan: Plan, path: Path) -> None:
    """Raises ConfigError when the model does not divide as the plan says."""
    if plan.ranks > 1 or plan.ep > 1:
        why = refusal(plan, numbers_of(read_config(path)))
        if why is not None:
            raise ConfigError(f"{path.name}: {why}")
