"""What a router sees of the places that nodes of several models share."""

from __future__ import annotations

from core.config import Region
from core.types import ModelName, Role
from regional.cluster import Cluster, Member

TURN_SHARE = 0.5
"""Of a turn is left on average, when somebody comes who has to wait for its end."""


class Places:
    """Of one region. Whoever starts nodes gives them away; here it is only known who has come."""

    def __init__(self, region: Region) -> None:
        self._pools = region.pools
        self._of_node = {node.name: node.pool for node in region.nodes if node.pool is not None}
        self._of_model: dict[str, set[str | None]] = {}
        for node in region.nodes:
            if node.role is not Role.PREFILL:
                self._of_model.setdefault(node.model, set()).add(node.pool)

    def full(self, model: ModelName, cluster: Cluster) -> bool:
        """Whether others have every place that a node which answers for it could take, or one of
        its own that leaves."""
        pools = self._of_model.get(model, set())
        return bool(pools) and all(
            pool is not None and self._taken(pool, model, cluster) for pool in pools
        )

    def wait_s(self, model: ModelName, cluster: Cluster) -> float:
        """About so long until a place is free for it, by what the others have to do."""
        if not self.full(model, cluster):
            return 0.0
        pools = [pool for pool in self._of_model[model] if pool is not None]
        return min(self._until_free_s(pool, cluster) for pool in pools)

    def _taken(self, pool: str, model: ModelName, cluster: Cluster) -> bool:
        holders = self._holders(pool, cluster)
        own = any(one.offers[0].model == model and not one.view().draining for one in holders)
        return not own and len(holders) >= self._pools[pool].places

    def _until_free_s(self, pool: str, cluster: Cluster) -> float:
        holders = self._holders(pool, cluster)
        if not all(one.placed for one in holders):
            return 0.0
        return min(map(_rest_s, holders)) + self._pools[pool].turn_s * TURN_SHARE

    def _holders(self, pool: str, cluster: Cluster) -> list[Member]:
        members = cluster.members()
        return [one for one in members if self._of_node.get(one.session.name) == pool]


def _rest_s(member: Member) -> float:
    """Until what runs on it has been answered."""
    return max(
        one.answer_tokens / max(1, one.sequences) / one.decode_tokens_per_s
        for one in member.views()
    )
