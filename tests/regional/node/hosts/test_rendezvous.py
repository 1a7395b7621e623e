"""The usual variables of a rendezvous, and what cannot be made of them."""

from __future__ import annotations

import pytest

from core.config import Node
from core.errors import ConfigError
from core.parallel import ONE_HOST, Plan
from core.types import Role
from regional.node.hosts.rendezvous import hosts_of

TWO = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


def node(plan: Plan, role: Role = Role.DECODE) -> Node:
    return Node(name="n", role=role, model="m", parallel=plan)


def test_two_hosts_share_the_ranks() -> None:
    hosts = hosts_of(node(Plan(tp=2, pp=2)), TWO, b"secret", trusted=True)
    assert (hosts.index, hosts.count, hosts.address, hosts.port) == (1, 2, "10.0.0.1", 29500)
    assert list(hosts.ranks(Plan(tp=2, pp=2))) == [2, 3]
    assert (
        hosts.secret
        == hosts_of(node(Plan(pp=2)), TWO | {"RANK": "0"}, b"secret", trusted=True).secret
    )
    assert hosts.secret != hosts_of(node(Plan(pp=2)), TWO, b"another", trusted=True).secret


@pytest.mark.parametrize(
    ("plan", "environment"),
    [(Plan(pp=2), {}), (Plan(pp=2), TWO | {"WORLD_SIZE": "1"}), (Plan(), TWO)],
    ids=["no variables", "a world of one", "one rank, whatever a launcher has set"],
)
def test_one_host_otherwise(plan: Plan, environment: dict[str, str]) -> None:
    assert hosts_of(node(plan), environment, b"s", trusted=True) is ONE_HOST


@pytest.mark.parametrize(
    ("plan", "changes", "says"),
    [
        (Plan(pp=2), {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many', not a number"),
        (Plan(pp=2), {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        (Plan(pp=2), {"RANK": "2"}, "RANK one of 0 to 1"),
        (Plan(pp=2), {"MASTER_ADDR": ""}, "MASTER_ADDR must name"),
        (Plan(pp=2), {"MASTER_PORT": "65535"}, "below 65535"),
        (Plan(pp=3), {}, r"3 ranks of node 'n' \(pp 3\) do not divide over 2 hosts"),
        (Plan(dp_attention=2), {}, "rank 1, which schedules a pool, must be on the first host"),
    ],
)
def test_what_does_not_fit_is_refused(plan: Plan, changes: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hosts_of(node(plan), TWO | changes, b"s", trusted=True)


def test_a_prefill_node_stays_on_one_host() -> None:
    with pytest.raises(ConfigError, match="one prefill node for each host"):
        hosts_of(node(Plan(pp=2), Role.PREFILL), TWO, b"s", trusted=True)


def test_plaintext_over_a_network_must_be_allowed() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1 in plaintext.*network_trusted"):
        hosts_of(node(Plan(pp=2)), TWO, b"s", trusted=False)
    here = TWO | {"MASTER_ADDR": "127.0.0.1"}
    assert hosts_of(node(Plan(pp=2)), here, b"s", trusted=False).count == 2
