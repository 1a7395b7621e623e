"""The world of the runbook's tests: two edges that share limits by Redis, two regions, tenants; and
the tables that `skerry` prints of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from msgspec.structs import replace

from core import config
from core.config_tenants import Access, Budgets, Tenant
from core.keys import append_new, new_key
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from deploy.state import FOLDER, running_topology
from tests.edge.tenants.conftest import RedisServer
from tests.servers import needed
from tests.tiny_text import write_tiny_folder
from tests.world.runbook import Crowd, Monitor, bearer, watching
from tests.world.scripted import CONTEXT, MODEL, PLAIN, Answer, ask, completion, topology

SMALL, LARGE = 2048, CONTEXT
"""Tokens of a pool: less than two prompts of two TIDES, and room for all of them."""
TIDES = "".join(f"at {hour} the keeper writes down the tide. " for hour in range(14))
SLOTS = 6
STORM_LIMIT, CROWD_LIMIT, SHARED_LIMIT = 10, 6, 12
TENANTS = {
    "reader": Tenant(regions=("us",)),
    "crowd": Tenant(),
    "storm": Tenant(requests_per_minute=STORM_LIMIT),
    "berth": Tenant(requests_per_minute=40),
    "quay": Tenant(requests_per_minute=SHARED_LIMIT),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """`said`: the lines of `skerry up`."""

    world: LocalWorld
    monitor: Monitor
    redis: RedisServer
    keys: dict[str, str]
    said: list[str]
    home: Path

    @property
    def topology(self) -> Path:
        """What the world runs now."""
        return running_topology(self.world.world.state)

    def file_with(self, change: Callable[[config.Topology], config.Topology]) -> Path:
        """A topology file with a change to that."""
        path = self.home / "changed.toml"
        now = config.parse(config.read(self.topology))
        path.write_text(toml_write.dump(change(now)), encoding="utf-8")
        return path

    def ask(self, edge: str, prompt: str, tenant: str = "", **more: object) -> Answer:
        base, headers = self.world.edges[edge], bearer(self.keys.get(tenant, ""))
        with httpx.Client(
            base_url=base, headers=headers, timeout=60, trust_env=False, verify=PLAIN
        ) as client:
            return ask(base, completion(prompt, **{"max_tokens": 8, **more}), client=client)

    def crowd(
        self,
        edge: str,
        prompts: Callable[[int], str],
        tenant: str,
        *,
        count: int,
        tokens: int = 8,
        pause_s: float = 0.0,
    ) -> Crowd:
        key = self.keys.get(tenant, "")
        return Crowd(
            self.world.edges[edge], prompts, count=count, tokens=tokens, key=key, pause_s=pause_s
        )

    def log(self, name: str) -> str:
        return (self.world.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def described(source: Path, redis: str) -> config.Topology:
    scripted = topology(source, step_ms=20.0, prefill_tokens_per_s=8000.0)

    def region(name: str, *nodes: str, kv_tokens: int) -> config.Region:
        return config.Region(
            name=name,
            nodes=tuple(
                config.Node(
                    name=one, role=Role.COMBINED, model=MODEL, kv_tokens=kv_tokens,
                    max_sequences=SLOTS, speculate=False,
                )
                for one in nodes
            ),
        )  # fmt: skip

    return replace(
        scripted,
        edges=tuple(replace(edge, admin=None) for edge in scripted.edges),
        regions=(
            region("eu", "eu-1", "eu-2", kv_tokens=LARGE),
            region("us", "us-1", kv_tokens=SMALL),
        ),
        access=Access(anonymous="always"),
        tenants=TENANTS,
        budgets=Budgets(redis=redis),
    )


def with_pools(topology: config.Topology, region: str, kv_tokens: int) -> config.Topology:
    return replace(topology, regions=tuple(
        replace(one, nodes=tuple(replace(node, kv_tokens=kv_tokens) for node in one.nodes))
        if one.name == region else one
        for one in topology.regions
    ))  # fmt: skip


def with_limit(topology: config.Topology, tenant: str, requests: int) -> config.Topology:
    limited = replace(topology.tenants[tenant], requests_per_minute=requests)
    return replace(topology, tenants={**topology.tenants, tenant: limited})


@contextmanager
def scene_in(home: Path, redis_folder: Path) -> Iterator[Scene]:
    """The world, up, with a Redis and a Prometheus of its own."""
    redis = RedisServer(needed("redis-server"), redis_folder)
    redis.start()
    file = home / "harbour.toml"
    source = write_tiny_folder(home / "tiny", context=CONTEXT)
    file.write_text(toml_write.dump(described(source, redis.url)), encoding="utf-8")
    said: list[str] = []
    try:
        with run_world(
            file, say=said.append, root=home / FOLDER, pauses=Pauses(0.1, 0.2, 5.0)
        ) as world:
            doors = [edge.listen for edge in world.world.topology.edges]
            doors += [region.http for region in world.world.topology.regions]
            made = {tenant: new_key(tenant, now=0) for tenant in TENANTS}
            book = world.world.state / world.world.topology.access.keys
            append_new(book, [record for _, record in made.values()])
            keys = {tenant: key for tenant, (key, _) in made.items()}
            with watching(home / "prometheus", doors) as monitor:
                yield Scene(world, monitor, redis, keys, said, home)
    finally:
        redis.kill()


def table(shown: str, head: str) -> str:
    """From the line of `skerry status` that begins with this word."""
    return shown[f"\n{shown}".index(f"\n{head}") :]


def cells(table: str, first: str) -> list[str]:
    """Of the first line that begins with this word."""
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [first])


def seconds(span: str) -> int:
    """Of a span as `skerry status` writes it."""
    return 60 * int(span[:-1]) if span.endswith("m") else int(span[:-1])


def listed(explained: str, tenant: str, outcome: str = "") -> str:
    """The ID of a request in the list of `skerry explain`; "": whatever became of it."""
    rows = [line.split() for line in explained.splitlines()[1:]]
    return next(row[0] for row in rows if row[3] == tenant and outcome in ("", row[6]))
