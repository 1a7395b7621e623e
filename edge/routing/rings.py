"""The ring as it is now: the topology's weights, or those that operators ordered meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.types import RegionName
from edge.routing.ring import Ring
from edge.routing.view import RegionView


class Rings:
    """Edges that hear the same regions have the same ring. One that is built is kept until a weight
    changes: building takes milliseconds."""

    def __init__(self, weights: Mapping[RegionName, int]) -> None:
        self._weights = dict(weights)
        self._ring = Ring(self._weights)

    def of(self, view: Iterable[RegionView]) -> Ring:
        weights = {**self._weights, **{region.name: region.weight for region in view}}
        if weights != self._weights:
            self._weights, self._ring = weights, Ring(weights)
        return self._ring
