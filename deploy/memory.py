"""Whether this machine has the memory that a topology's KV pools will take. Pure but for reading
the models' descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.config import Model, Node, Region, World
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
        sizes = {node.name: pool_mb(world, node) for node in region.nodes}
        total += sum(at_once(region, sizes))
        for node in region.nodes:
            if sizes[node.name] > free:
                yield (
                    f"node {node.name!r}: kv_tokens = {node.kv_tokens} takes "
                    f"{sizes[node.name]:,} MB, and {free:,} MB are free here"
                )
    if total > free:
        yield f"all KV pools together take {total:,} MB, and {free:,} MB are free on this machine"


def no_room(world: World, node: Node, free_mb: int | None = None) -> str | None:
    """Why a node that is to come to a running world would not fit into what is free; on a GPU the
    node itself will see."""
    free = free_memory_mb() if free_mb is None else free_mb
    if free is None or node.device == "cuda":
        return None
    pool, weights = pool_mb(world, node), weights_mb(world, node)
    if pool + weights <= free:
        return None
    return (
        f"node {node.name!r} does not fit: {weights:,} MB of weights and {pool:,} MB for "
        f"kv_tokens = {node.kv_tokens}, and {free:,} MB are free here; take fewer tokens, "
        "a smaller model, or another machine"
    )


def weights_mb(world: World, node: Node) -> int:
    """Of the files. 0 where the model is not on this machine, or has no weights."""
    if world.topology.models[node.model].engine == "scripted":
        return 0
    try:
        path = resolve_source(world.model_source(node.model))
    except ConfigError:
        return 0
    files = path.glob("*.safetensors") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files) // 1_000_000


def at_once(region: Region, sizes: Mapping[str, int]) -> Iterator[int]:
    """What may be there at the same time: of nodes that share places the largest."""
    shared: dict[str, list[int]] = {name: [] for name in region.pools}
    for node in region.nodes:
        if node.pool is None:
            yield sizes[node.name]
        else:
            shared[node.pool].append(sizes[node.name])
    for name, ones in shared.items():
        yield from sorted(ones, reverse=True)[: region.pools[name].places]


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
