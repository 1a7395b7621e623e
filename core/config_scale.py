"""How many nodes of a model a region keeps running: bounds, and when to start or stop one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:  # core.config has the types and imports this module
    from core.config import Node, Region

_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For each role of the model apart. A role that has fewer nodes than a bound says has all of
    them."""

    least: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Run always; 0: none until somebody asks for the model."""
    most: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """All that the topology has when absent."""
    idle_s: _Seconds = 300.0
    """Without a request for so long, only `least` run on."""
    queue_s: _Seconds = 1.0
    """One more is started where a request that comes now would wait longer than this."""
    first_token_s: _Seconds | None = None
    """The same for the mean time to the first token of what was answered lately."""
    calm_s: _Seconds = 60.0
    """One is stopped when for so long without a break the others would have been enough; and after
    some were started, the next are not before a quarter of this."""


def at_first(region: Region) -> Mapping[tuple[str, str], int]:
    """By model and role: how many nodes run before anybody has asked for anything."""
    return {
        (node.model, node.role): scale.least
        for node in region.nodes
        if (scale := region.scale.get(node.model)) is not None
    }


def first_nodes(
    region: Region,
    wanted: Mapping[tuple[str, str], int],
    resting: Collection[str] = (),
    here: Collection[str] = (),
) -> Iterator[Node]:
    """The nodes that should run: of each model and role so many, those that do not rest before
    those that do, those that are `here` already before others, the first ones of the topology; all
    of what `wanted` does not name."""
    seen: Counter[tuple[str, str]] = Counter()
    for node in sorted(region.nodes, key=lambda one: (one.name in resting, one.name not in here)):
        key = node.model, node.role
        seen[key] += 1
        if key not in wanted or seen[key] <= wanted[key]:
            yield node


def scale_complaints(region: Region) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with a region's `scale`: where below it, and what."""
    for model, scale in region.scale.items():
        roles = [node.role for node in region.nodes if node.model == model]
        there = max(map(roles.count, roles), default=0)
        most = there if scale.most is None else scale.most
        if not there:
            yield (model,), f"region {region.name!r} has no node that serves {model!r}"
        elif most > there:
            yield (
                (model, "most"),
                f"most is {most}, but region {region.name!r} has {there} nodes of a role that "
                f"serve {model!r}",
            )
        elif scale.least > most:
            yield (model, "least"), f"least is {scale.least}, more than the {most} that may run"
