"""Who may come in, and in whose name."""

from __future__ import annotations

import pytest

from core.config import Topology, parse
from core.errors import Forbidden, Unauthorized
from core.keys import KeyBook, Revoked, new_key
from core.types import GenerateRequest, ModelName, RequestId
from edge.tenants.door import NO_KEY, Door

NOW = 1_000_000
WORLD = """
version = 1
[access]
anonymous = "{anonymous}"
[models.tiny]
source = "tiny.gguf"
aliases = ["small"]
[models.other]
source = "other.gguf"
[tenants.acme]
models = ["small"]
priority = 3
[tenants.twin]
namespace = "acme"
[tenants.anonymous]
requests_per_minute = 7
[[edges]]
name = "here"
[[regions]]
name = "eu"
[[regions.nodes]]
name = "eu-1"
role = "combined"
model = "tiny"
"""


def world(anonymous: str = "never") -> Topology:
    return parse(WORLD.replace("{anonymous}", anonymous))


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def request(model: str = "tiny", priority: int = 0) -> GenerateRequest:
    return GenerateRequest(
        id=RequestId("r"), model=ModelName(model), prompt="hi", seed=1, rendered_at=1,
        priority=priority, namespace="forged",
    )  # fmt: skip


def test_a_key_names_its_tenant() -> None:
    key, record = new_key("acme", now=NOW)
    door = Door(world(), lambda: KeyBook([record]), clock=lambda: NOW)
    for header in (f"Bearer {key}", f"bearer  {key} "):
        caller = door.authenticate({b"authorization": header.encode()})
        assert (caller.name, caller.key_id, caller.namespace) == ("acme", record.id, "acme")


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic eHg6eQ==", "x"])
@pytest.mark.parametrize("anonymous", ["never", "until-keys"])
def test_no_good_key_is_401_once_there_are_keys(header: str, anonymous: str) -> None:
    book = KeyBook([new_key("acme", now=NOW)[1]])
    door = Door(world(anonymous), lambda: book, clock=lambda: NOW)
    headers = {b"authorization": header.encode()} if header else {}
    with pytest.raises(Unauthorized) as refused:
        door.authenticate(headers)
    assert refused.value.http_status == 401
    assert "wrong" not in refused.value.message


def test_a_revoked_key_is_out_as_soon_as_the_book_says_so() -> None:
    key, record = new_key("acme", now=NOW)
    book = KeyBook([record])
    door = Door(world("always"), lambda: book, clock=lambda: NOW)
    assert door.authenticate(bearer(key)).name == "acme"
    book.add(Revoked(id=record.id, at=NOW))
    with pytest.raises(Unauthorized, match=record.id):
        door.authenticate(bearer(key))  # never quietly anonymous instead


def test_until_the_first_key_and_never_again() -> None:
    book = KeyBook()
    door = Door(world("until-keys"), lambda: book, clock=lambda: NOW)
    caller = door.authenticate(bearer("none"))  # what clients send that insist on a key
    assert (caller.name, caller.key_id, caller.namespace) == ("anonymous", NO_KEY, "")
    assert caller.tenant.requests_per_minute == 7
    _, record = new_key("acme", now=NOW)
    book.add(record)
    book.add(Revoked(id=record.id, at=NOW))
    with pytest.raises(Unauthorized):
        door.authenticate({})


def test_always_lets_strangers_in_beside_tenants() -> None:
    key, record = new_key("acme", now=NOW)
    door = Door(world("always"), lambda: KeyBook([record]), clock=lambda: NOW)
    assert door.authenticate({}).name == "anonymous"
    assert door.authenticate(bearer(key)).name == "acme"
    with pytest.raises(Unauthorized):
        door.authenticate(bearer(new_key("acme", now=NOW)[0]))


@pytest.mark.parametrize("tenant", ["gone", "anonymous"])
def test_a_key_of_nobody(tenant: str) -> None:
    """Its tenant left the topology; or a file was forged to make an anonymous one."""
    key, record = new_key(tenant, now=NOW)
    door = Door(world(), lambda: KeyBook([record]), clock=lambda: NOW)
    with pytest.raises(Unauthorized):
        door.authenticate(bearer(key))


def test_namespace_and_priority_are_the_tenants() -> None:
    key, record = new_key("acme", now=NOW)
    twin, second = new_key("twin", now=NOW)
    door = Door(world(), lambda: KeyBook([record, second]), clock=lambda: NOW)
    caller = door.authenticate(bearer(key))
    bound = caller.bind(request())
    assert (bound.namespace, bound.priority) == ("acme", 3)
    assert caller.bind(request(priority=9)).priority == 9
    assert door.authenticate(bearer(twin)).bind(request()).namespace == "acme"
    with pytest.raises(Forbidden) as refused:
        caller.bind(request("other"))
    assert (refused.value.http_status, refused.value.param) == (403, "model")
