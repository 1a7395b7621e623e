"""Workers of an edge ask in the name of the tenant that they were deployed for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from core.errors import Forbidden, Unauthorized
from core.keys import KeyBook, new_key
from core.types import ModelName
from edge.tenants.door import NO_KEY, Door
from tests.edge.tenants.test_door import bearer, request, world


@dataclass(frozen=True)
class Worker:
    name: str
    tenant: str


class Known:
    def of_token(self, token: bytes) -> Worker | None:
        return {
            b"a": Worker("chat", "acme"),
            b"b": Worker("open", "anonymous"),
            b"c": Worker("lost", "gone"),
        }.get(token)


def token(word: bytes) -> dict[bytes, bytes]:
    return {b"x-skerry-worker": word}


def test_a_worker_is_its_tenant() -> None:
    door = Door(world(), KeyBook, agents=Known())
    caller = door.authenticate(token(b"a"))
    assert (caller.name, caller.worker, caller.key_id, caller.namespace) == (
        "acme", "chat", NO_KEY, "acme",
    )  # fmt: skip
    assert caller.bind(request()).priority == 3
    with pytest.raises(Forbidden):
        caller.bind(request("other"))
    assert caller.may_ask(ModelName("tiny"))


@pytest.mark.parametrize("word", [b"", b"guess", b"c"])
def test_a_token_that_nobody_has_opens_nothing(word: bytes) -> None:
    key, record = new_key("acme", now=1)
    door = Door(world("always"), lambda: KeyBook([record]), agents=Known())
    with pytest.raises(Unauthorized, match="No Worker"):
        door.authenticate({**token(word), **bearer(key)})
    with pytest.raises(Unauthorized, match="No Worker"):
        Door(world("always"), KeyBook).authenticate(token(b"a"))


def test_a_worker_of_nobody_ends_with_the_open_door() -> None:
    book = KeyBook()
    door = Door(world("until-keys"), lambda: book, agents=Known())
    assert door.authenticate(token(b"b")).worker == "open"
    _, record = new_key("acme", now=1)
    book.add(record)
    with pytest.raises(Unauthorized, match="deploy it for a tenant"):
        door.authenticate(token(b"b"))
    assert door.authenticate(token(b"a")).worker == "chat"
