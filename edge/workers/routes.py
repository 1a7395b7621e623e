"""Which Worker a request is for, by host and path. Pure.

A pattern is a host and a path, `example.com/images/*`: a `*` may begin the host and end the path.
The most particular pattern wins: a host without `*` before one with it, then the longer one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.errors import WorkerRefused

_HOST = re.compile(r"(\*\.?)?[a-z0-9-]+(\.[a-z0-9-]+)*")
_SCHEME = re.compile(r"^(https?|\*)://")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Route:
    """`any_host`: hosts that end in `host`; `any_path`: paths that begin with `path`."""

    host: str
    path: str
    any_host: bool = False
    any_path: bool = False

    def matches(self, host: str, path: str) -> bool:
        if not (host.endswith(self.host) if self.any_host else host == self.host):
            return False
        return path.startswith(self.path) if self.any_path else path == self.path

    @property
    def rank(self) -> tuple[bool, int, bool, int]:
        """Greater is more particular."""
        return not self.any_host, len(self.host), not self.any_path, len(self.path)


def read_route(pattern: str) -> Route:
    """Raises WorkerRefused."""
    text = _SCHEME.sub("", pattern.strip())
    host, slash, path = text.partition("/")
    host = host.lower()
    if "?" in text or "#" in text:
        raise _bad(pattern, "a query is no part of a route")
    if not _HOST.fullmatch(host):
        raise _bad(pattern, "it begins with a host, which may begin with '*'")
    any_path = path.endswith("*") or not slash
    path = path.removesuffix("*")
    if "*" in path:
        raise _bad(pattern, "'*' may only begin the host and end the path")
    return Route(host.removeprefix("*"), f"/{path}", host.startswith("*"), any_path)


def check_route(pattern: str, zones: Iterable[str]) -> Route:
    """A route that lies within one of `zones`. Raises WorkerRefused: any other host may be one by
    which the edge itself is called."""
    route = read_route(pattern)
    bare = route.host.removeprefix(".")
    if bare == "localhost" or _is_address(bare):
        raise _bad(pattern, "this host is the edge itself; a route names a host of the Worker's")
    zones = sorted(set(zones))
    within = any(bare == zone or bare.endswith(f".{zone}") for zone in zones)
    if not within or (route.any_host and not route.host.startswith(".") and bare not in zones):
        raise _bad(
            pattern,
            f"this host is in none of the domains for Workers ({', '.join(zones)}); the world's"
            " operator adds it to workers.zones of the topology",
        )
    return route


def check_own_host(pattern: str, domain: str, mine: str) -> None:
    """`NAME.domain` is the host of the Worker of that name, also of one that is still to come.
    Raises WorkerRefused for a route of another one that names it, or all of them."""
    route = read_route(pattern)
    label, _, above = route.host.partition(".")
    if route.any_host:
        taken = route.host.removeprefix(".") == domain
    else:
        taken = above == domain and label != mine
    if taken:
        whose = "all Workers" if route.any_host else f"the Worker {label!r}"
        raise _bad(
            pattern,
            f"this host belongs to {whose}: under {domain} each has NAME.{domain} to itself. Name"
            f" {mine}.{domain}, a host below it, or one of another domain (workers.zones)",
        )


class Routes(Generic[_T]):
    """What the routes of all Workers lead to."""

    def __init__(self, routes: Sequence[tuple[Route, _T]] = ()) -> None:
        self._routes = sorted(routes, key=lambda pair: pair[0].rank, reverse=True)

    def find(self, host: str, path: str, of: _T | None = None) -> _T | None:
        """`of`: whose host this is; no route of another one leads away from it."""
        for route, target in self._routes:
            if of in (None, target) and route.matches(host, path):
                return target
        return None


def conflict(mine: str, routes: Sequence[str], others: Mapping[str, Sequence[str]]) -> str | None:
    """What two Workers want at once, said in a sentence; None where nothing is."""
    wanted = {read_route(one): one for one in routes}
    for name, patterns in others.items():
        for pattern in patterns:
            if name != mine and read_route(pattern) in wanted:
                return (
                    f"the route {pattern!r} belongs to the Worker {name!r}; take it out of one of"
                    f" the two, or delete {name!r}"
                )
    return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _bad(pattern: str, why: str) -> WorkerRefused:
    return WorkerRefused(f"the route {pattern[:200]!r} cannot be served: {why}", param="routes")
