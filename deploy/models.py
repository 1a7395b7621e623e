"""Whether a topology's models can be had on this machine: the source is there, is a model that we
know, and holds as many tokens as the topology promises. Weights are not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.config import Model, World, read
from core.config_locate import line_of
from core.errors import ConfigError
from core.models.config import from_gguf, from_json
from core.models.gguf import read_gguf
from core.models.source import resolve_source


def check_models(world: World) -> None:
    """Raises ConfigError with file and line."""
    for name, model in world.topology.models.items():
        for key, what in _complaints(world, name, model):
            line = line_of(read(world.path), ("models", name, key))
            raise ConfigError(f"{world.path}:{line}: models.{name}.{key}: {what}")


def _complaints(world: World, name: str, model: Model) -> Iterator[tuple[str, str]]:
    try:
        path = resolve_source(world.model_source(name))
        if model.engine == "scripted":
            return  # needs a tokenizer and no model
        context = _context(path)
    except ConfigError as error:
        yield "source", str(error)
        return
    if model.context is not None and model.context > context:
        yield "context", f"{model.context} is more than the {context} tokens of the model itself"


def _context(path: Path) -> int:
    """The model's own limit in tokens. Raises ConfigError."""
    if path.is_dir():
        return from_json(path / "config.json").context
    file = read_gguf(path)
    try:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        return from_gguf(file.metadata, shapes, str(path)).context
    finally:
        file.close()
