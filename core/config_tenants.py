"""The part of a topology that says who may ask, how much, and what it costs.

Its types and their checks; `core.config` holds them together with the rest. A tenant is a caller
with keys of its own. Limits that are absent do not limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from core.address import is_loopback, split_address
from core.errors import ConfigError
from core.types import Usage

if TYPE_CHECKING:  # core.config has the types and imports this module
    from core.config import Topology
    from core.config_locate import Path

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]

ANONYMOUS = "anonymous"
"""The tenant of callers without a key; `[tenants.anonymous]` may give it limits."""
MILLION = Decimal(1_000_000)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Access(_Section, frozen=True):
    anonymous: Literal["never", "until-keys", "always"] = "never"
    """Whether a caller needs no key. until-keys: as long as no key was ever made in this world;
    revoking the last one does not open it again. Only for edges that listen on loopback."""
    keys: str = "keys.jsonl"
    """The key file, relative to the state folder; edges that share the folder share it."""
    keys_from: str | None = None
    """HOST:PORT, or URL, of an edge whose key list this world's edges follow besides their own
    file."""


class Tenant(_Section, frozen=True):
    namespace: str | None = None
    """Whose prefixes it shares; its own name when absent."""
    regions: tuple[str, ...] = ()
    """The regions that may see its prompts; all when empty."""
    models: tuple[str, ...] = ()
    """The models it may ask, by name or alias; all when empty."""
    priority: _Count = 0
    """Lower is served first."""
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    """Prompt and answer together, cached prompt tokens included."""
    tokens_per_day: _Positive | None = None
    """A day is UTC's."""
    concurrent_streams: _Positive | None = None
    """Requests in flight at one moment, streamed or not: on one machine, or on all that share a
    Redis."""


class Budgets(_Section, frozen=True):
    redis: Annotated[str, msgspec.Meta(pattern=r"^(rediss?|unix)://.")] | None = None
    """redis://HOST:PORT/NUMBER, where edges with different state folders share their limits; its
    password is `secrets.redis`. Absent: each state folder grants the whole limit."""
    lease: _Share = 0.1
    """The share of a limit that an edge takes from Redis at a time."""
    when_redis_is_lost: Literal["refuse", "allow"] = "refuse"
    """Once what was leased is used up: refuse with limits_unavailable, or let every edge grant the
    whole limit by itself until Redis is back."""
    redis_timeout_s: _Seconds = 1.0
    assumed_answer_tokens: _Positive = 1024
    """Reserved for an answer whose caller gave no limit; the end settles what it was."""


class Price(_Section, frozen=True):
    """For a million tokens, in `currency` of the topology; decimal, never binary."""

    input: Decimal = Decimal(0)
    cached_input: Decimal | None = None
    """The input's price when absent."""
    output: Decimal = Decimal(0)

    def of(self, usage: Usage) -> Decimal:
        cached = self.input if self.cached_input is None else self.cached_input
        computed = usage.prompt_tokens - usage.cached_tokens
        total = (
            self.input * computed
            + cached * usage.cached_tokens
            + self.output * usage.completion_tokens
        )
        return total / MILLION


def tenant_complaints(topology: Topology) -> Iterator[tuple[Path, str]]:
    """What types cannot say: (path to the value, what is wrong)."""
    regions = {region.name for region in topology.regions}
    spaces: dict[str, tuple[str, frozenset[str]]] = {}
    for name, tenant in topology.tenants.items():
        path: Path = ("tenants", name)
        for strange in sorted(set(tenant.regions) - regions):
            yield (*path, "regions"), f"tenant {name!r} names {strange!r}, which is no region"
        for model in tenant.models:
            if topology.canonical_model(model) is None:
                yield (*path, "models"), f"tenant {name!r} names {model!r}, which is no model"
        space = topology.namespace_of(name)
        first, allowed = spaces.setdefault(space, (name, frozenset(tenant.regions)))
        if allowed != frozenset(tenant.regions):
            yield (
                (*path, "regions"),
                f"tenants {first!r} and {name!r} share the namespace {space!r}, so their regions "
                "must be the same",
            )
    yield from _open_doors(topology)
    for name, one in topology.models.items():
        if one.price is not None:
            yield from _bad_price(("models", name, "price"), one.price)


def _open_doors(topology: Topology) -> Iterator[tuple[Path, str]]:
    if topology.access.anonymous == "never":
        return
    for place, edge in enumerate(topology.edges):
        try:
            host, _ = split_address(edge.listen)
        except ConfigError:
            continue  # the check of addresses complains
        if not is_loopback(host):
            yield (
                ("edges", place, "listen"),
                f"edge {edge.name!r} listens on {edge.listen}, and callers without a key are for "
                'loopback only; set access.anonymous = "never"',
            )


def _bad_price(path: Path, price: Price) -> Iterator[tuple[Path, str]]:
    for key in ("input", "cached_input", "output"):
        value: Decimal | None = getattr(price, key)
        if value is not None and not (value.is_finite() and value >= 0):
            yield (*path, key), f"{key}: {value} is no price"
