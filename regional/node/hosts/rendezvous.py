"""Which hosts a node's ranks are spread over: the usual variables of a rendezvous.

MASTER_ADDR and MASTER_PORT: where the first host is reached; the port above it is taken too, for
the front and its outposts. RANK and WORLD_SIZE: which of how many hosts this one is.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from core.address import is_loopback
from core.config import Node
from core.errors import ConfigError
from core.parallel import ONE_HOST, Hosts
from core.types import Role

_LAST_PORT = 65534
"""The one above it is used as well."""


def hosts_of(node: Node, environment: Mapping[str, str], secret: bytes, *, trusted: bool) -> Hosts:
    """One host unless the environment names several. `secret`: the region's; `trusted`: hidden
    states, KV and control may cross the network in plaintext. Raises ConfigError."""
    count = _number(environment, "WORLD_SIZE", 1, at_least=1)
    if count == 1 or node.parallel.ranks == 1:
        return ONE_HOST
    hosts = Hosts(
        index=_number(environment, "RANK", -1),
        count=count,
        address=environment.get("MASTER_ADDR", ""),
        port=_number(environment, "MASTER_PORT", 0),
        secret=hmac.new(secret, node.name.encode(), "blake2b").hexdigest(),
    )
    if not hosts.address or not 0 < hosts.port <= _LAST_PORT or not 0 <= hosts.index < count:
        raise ConfigError(
            f"WORLD_SIZE is {count}: MASTER_ADDR must name the first host, MASTER_PORT a port of it"
            f" below {_LAST_PORT + 1}, RANK one of 0 to {count - 1}"
        )
    if not (trusted or is_loopback(hosts.address)):
        raise ConfigError(
            f"the ranks of node {node.name!r} would talk to {hosts.address} in plaintext; set"
            " routing.network_trusted = true where the network keeps others out"
        )
    _check(node, hosts)
    return hosts


def _check(node: Node, hosts: Hosts) -> None:
    plan = node.parallel
    if plan.ranks % hosts.count:
        raise ConfigError(
            f"the {plan.ranks} ranks of node {node.name!r} ({plan}) do not divide over"
            f" {hosts.count} hosts"
        )
    share = plan.ranks // hosts.count
    last = plan.leader(plan.dp_attention - 1)
    if last >= share:
        raise ConfigError(
            f"node {node.name!r}: rank {last}, which schedules a pool, must be on the first host,"
            f" which has {share} ranks: give it more, or split stages over hosts"
        )
    if node.role is Role.PREFILL:
        raise ConfigError(
            f"node {node.name!r}: a prefill node sends KV out of the memory of one host; use one"
            " prefill node for each host"
        )


def _number(environment: Mapping[str, str], name: str, default: int, *, at_least: int = -1) -> int:
    text = environment.get(name, str(default))
    try:
        value = int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, not a number") from error
    if value < at_least:
        raise ConfigError(f"{name} is {value}, below {at_least}")
    return value
