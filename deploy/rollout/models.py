"""A topology with one model more or less: what `skerry models add | remove` asks for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from core.config import Model, Node, Region, Topology
from core.config_check import complaints
from core.config_scale import Scale
from core.errors import ConfigError
from core.nearest import did_you_mean
from core.parallel import Plan
from core.types import Role
from deploy.rollout.messages import AddModel

LONGEST_SLUG = 40


def with_model(topology: Topology, ask: AddModel) -> Topology:
    """Raises ConfigError with what does not fit."""
    if topology.canonical_model(ask.name) is not None:
        raise ConfigError(
            f"a model {ask.name!r} is there already; `skerry models remove` takes it out"
        )
    known = [region.name for region in topology.regions]
    for name in ask.regions:
        if name not in known:
            hint = did_you_mean(name, known, f"there are: {', '.join(known)}")
            raise ConfigError(f"no region is named {name!r}; {hint}")
    model = Model(
        source=ask.source,
        digest=ask.digest or None,
        aliases=ask.aliases,
        context=ask.context,
        engine=ask.engine,
        scripted=ask.scripted,
    )
    taken = set(_names(topology))
    like = _named(topology, ask.like)
    after = replace(
        topology,
        models={**topology.models, ask.name: model},
        regions=tuple(
            _with_nodes(region, like or _decoder(region), ask, taken)
            if region.name in (ask.regions or known)
            else region
            for region in topology.regions
        ),
    )
    for complaint in complaints(after):
        raise ConfigError(complaint.what)
    return after


def without_model(topology: Topology, name: str) -> Topology:
    """Raises ConfigError with what does not fit."""
    found = topology.canonical_model(name)
    if found is None:
        hint = did_you_mean(name, topology.models, f"there are: {', '.join(topology.models)}")
        raise ConfigError(f"no model is named {name!r}; {hint}")
    for region in topology.regions:
        if all(node.model == found for node in region.nodes):
            raise ConfigError(
                f"region {region.name!r} would have no node: it serves nothing but {found}"
            )
    after = replace(
        topology,
        models={key: model for key, model in topology.models.items() if key != found},
        regions=tuple(_without(region, found) for region in topology.regions),
    )
    for complaint in complaints(after):
        raise ConfigError(complaint.what)
    return after


def regions_with(topology: Topology, model: str) -> list[str]:
    """The regions that have a node for it."""
    return [
        region.name
        for region in topology.regions
        if any(node.model == model for node in region.nodes)
    ]


def _with_nodes(region: Region, like: Node, ask: AddModel, taken: set[str]) -> Region:
    if like.device == "cuda" and not (ask.gpus or ask.pool):
        raise ConfigError(
            f"which GPUs of region {region.name!r} may {ask.name} have? Say --gpus, or --pool to "
            "share those of other models"
        )
    nodes = []
    for role in ask.roles:
        name = _free(f"{region.name}-{_slug(ask.name)}", role, taken)
        taken.add(name)
        nodes.append(
            replace(
                like,
                name=name,
                role=role,
                model=ask.name,
                pool=ask.pool or None,
                gpus=ask.gpus or (like.gpus if ask.pool else ()),
                kv_tokens=ask.kv_tokens or like.kv_tokens,
                parallel=like.parallel if ask.like else Plan(),
                disk_tier=None,
            )
        )
    scale = dict(region.scale)
    if ask.on_demand or ask.pool:
        scale[ask.name] = Scale(least=0)
    return replace(region, nodes=(*region.nodes, *nodes), scale=scale)


def _named(topology: Topology, name: str) -> Node | None:
    """The node that new ones are to be like. Raises ConfigError."""
    nodes = {node.name: node for region in topology.regions for node in region.nodes}
    if name and name not in nodes:
        hint = did_you_mean(name, nodes, f"there are: {', '.join(nodes)}")
        raise ConfigError(f"no node is named {name!r}; {hint}")
    return nodes.get(name)


def _decoder(region: Region) -> Node:
    return next(node for node in region.nodes if node.role is not Role.PREFILL)


def _without(region: Region, model: str) -> Region:
    nodes = tuple(node for node in region.nodes if node.model != model)
    pools = {node.pool for node in nodes}
    return replace(
        region,
        nodes=nodes,
        scale={key: scale for key, scale in region.scale.items() if key != model},
        pools={name: pool for name, pool in region.pools.items() if name in pools},
    )


def _names(topology: Topology) -> Iterator[str]:
    yield from (edge.name for edge in topology.edges)
    for region in topology.regions:
        yield region.name
        yield from (node.name for node in region.nodes)


def _slug(model: str) -> str:
    """`@cf/meta/llama-3.1-8b` is llama-3-1-8b in the name of a node."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:LONGEST_SLUG].rstrip("-") or "model"


def _free(base: str, role: Role, taken: set[str]) -> str:
    name = base if role is Role.COMBINED else f"{base}-{role}"
    number, tried = 1, name
    while tried in taken:
        number += 1
        tried = f"{name}-{number}"
    return tried


def fresh_nodes(before: Topology, after: Topology) -> Sequence[Node]:
    """Those of `after` that `before` does not have."""
    known = set(_names(before))
    return [node for region in after.regions for node in region.nodes if node.name not in known]
