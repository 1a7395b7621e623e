"""Keys from the callers' side: does a world want one, how is it sent, and one for ourselves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from core.config import World
from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from core.keys import Revoked, append_new, new_key
from deploy.inside import client as client_of
from deploy.keys import book_of, key_file

KEY_VARIABLE = "SKERRY_KEY"
SEEN_S = 10.0
"""Within this every edge has read a new key."""
_HOUR_S = 3600


def headers_of(key: str | None) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def needs_key(world: World) -> bool:
    if world.topology.access.anonymous == "until-keys":
        return book_of(world).made
    return world.topology.access.anonymous == "never"


@contextmanager
def own_key(world: World, edges: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Headers that open a running world: none where none are needed, else those of a key made now
    and revoked in the end. Raises ConfigError where no tenant could own it."""
    if not needs_key(world):
        yield {}
        return
    tenants = [name for name in world.topology.tenants if name != ANONYMOUS]
    if not tenants:
        raise ConfigError(f"{world.path}: callers need a key, and there is no tenant to own one")
    now = int(time.time())
    key, record = new_key(tenants[0], now=now, label="ours", expires=now + _HOUR_S)
    append_new(key_file(world), [record])
    try:
        for url in edges.values():
            _wait_until_seen(world, url, key)
        yield headers_of(key)
    finally:
        append_new(key_file(world), [Revoked(id=record.id, at=int(time.time()))])


def _wait_until_seen(world: World, edge: str, key: str) -> None:
    end = time.monotonic() + SEEN_S
    with client_of(world, headers=headers_of(key)) as client:
        while client.get(f"{edge}/v1/models").status_code == 401:
            if time.monotonic() > end:
                raise ConfigError(f"{edge} does not know a key that was made {SEEN_S:g} s ago")
            time.sleep(0.1)
