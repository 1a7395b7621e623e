"""Whether a topology's models can be had on this machine: the source is there, is a model that we
know, and holds as many tokens as the topology promises. Weights are not read."""

from __future__ import annotations

from collections.abc import Iterator

from core.config import Model, Node, Scripted, World, read
from core.config_locate import line_of
from core.errors import ConfigError
from core.models.numbers import numbers_of, read_config
from core.models.source import resolve_source
from core.parallel import Plan, refusal


def check_models(world: World) -> None:
    """Raises ConfigError with file and line."""
    for name, model in world.topology.models.items():
        for key, what in _complaints(world, name, model):
            line = line_of(read(world.path), ("models", name, key))
            raise ConfigError(f"{world.path}:{line}: models.{name}.{key}: {what}")
    check_plans(world)


def check_model(world: World, name: str) -> None:
    """One that no file has yet. Raises ConfigError."""
    for _, what in _complaints(world, name, world.topology.models[name]):
        raise ConfigError(what)


def _complaints(world: World, name: str, model: Model) -> Iterator[tuple[str, str]]:
    try:
        path = resolve_source(world.model_source(name))
        if model.engine == "scripted":
            return  # needs a tokenizer and no model
        context = read_config(path).context_limit
    except ConfigError as error:
        yield "source", str(error)
        return
    if model.context is not None and model.context > context:
        yield "context", f"{model.context} is more than the {context} tokens of the model itself"


def check_plans(world: World) -> None:
    """Whether each node's model divides as its plan says, as far as the model is on this machine.
    Raises ConfigError with file and line."""
    for place, region in enumerate(world.topology.regions):
        for seat, node in enumerate(region.nodes):
            if node.parallel == Plan():
                continue
            why = _plan_complaint(world, node)
            if why is not None:
                path = ("regions", place, "nodes", seat, "parallel")
                line = line_of(read(world.path), path)
                raise ConfigError(f"{world.path}:{line}: node {node.name!r}: {why}")


def _plan_complaint(world: World, node: Node) -> str | None:
    model = world.topology.models[node.model]
    if model.engine == "scripted":
        return refusal(node.parallel, (model.scripted or Scripted()).numbers)
    try:
        config = read_config(resolve_source(world.model_source(node.model)))
    except ConfigError:
        return None  # not on this machine: the node that has it will say
    return refusal(node.parallel, numbers_of(config))
