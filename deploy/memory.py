"""Whether this machine has the memory that a topology's KV pools will take. Pure but for reading
the models' descriptions."""

from __future__ import annotations

from collections.abc import Iterator

from core.config import Model, Node, World
from core.errors import ConfigError
from core.kv.geometry import DTYPE_BYTES
from core.models.config import ModelConfig
from core.models.numbers import read_config
from core.models.source import resolve_source
from core.types import BLOCK_TOKENS
from deploy.doctor import free_memory_mb


def check_memory(world: World, free_mb: int | None = None) -> Iterator[str]:
    """What is too large for a machine that runs the whole world: a pool is filled bit by bit, so
    that it would be noticed only in the middle of somebody's answer."""
    free = free_memory_mb() if free_mb is None else free_mb
    if free is None:
        return
    total = 0
    for region in world.topology.regions:
        for node in region.nodes:
            size = pool_mb(world, node)
            total += size
            if size > free:
                yield (
                    f"node {node.name!r}: kv_tokens = {node.kv_tokens} takes {size:,} MB, and "
                    f"{free:,} MB are free here"
                )
    if total > free:
        yield f"all KV pools together take {total:,} MB, and {free:,} MB are free on this machine"


def pool_mb(world: World, node: Node) -> int:
    """Of all its ranks together. 0 where the model is not on this machine."""
    model = world.topology.models[node.model]
    tokens = node.kv_tokens * node.parallel.dp_attention
    if model.engine == "scripted":
        return tokens // BLOCK_TOKENS * _scripted_block(model) // 1_000_000
    try:
        config = read_config(resolve_source(world.model_source(node.model)))
    except ConfigError:
        return 0
    return tokens * bytes_per_token(config, node.dtype) // 1_000_000


def bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Over all layers, as if none had a window."""
    size = DTYPE_BYTES["bfloat16" if dtype == "auto" else dtype]
    if config.latent is not None:
        return config.layers * (config.latent.rank + config.latent.rope) * size
    return config.layers * 2 * config.kv_heads * config.head_dim * size


def _scripted_block(model: Model) -> int:
    return model.scripted.block_bytes if model.scripted else 4096
