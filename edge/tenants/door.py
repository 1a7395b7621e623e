"""From a request's headers to who is asking. Pure: the key book is kept fresh by `keyring`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from core.config import Topology
from core.config_tenants import ANONYMOUS, Tenant
from core.errors import Forbidden, Unauthorized
from core.keys import KeyBook, key_id
from core.types import GenerateRequest, ModelName

NO_KEY = "-"
"""Stands for the key's ID in logs and records of callers without one."""
WORKER_HEADER = b"x-skerry-worker"
"""Of an edge's own Workers: the token that their runtime says for them."""


class Agent(Protocol):
    """A Worker and the tenant that it acts for."""

    @property
    def name(self) -> str: ...
    @property
    def tenant(self) -> str: ...


class Agents(Protocol):
    def of_token(self, token: bytes) -> Agent | None: ...


class NoAgents:
    """Of an edge without Workers."""

    def of_token(self, token: bytes) -> Agent | None:
        return None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `models`: the ones it may ask, None for all."""

    name: str
    tenant: Tenant
    key_id: str
    namespace: str
    models: frozenset[ModelName] | None
    worker: str = ""
    """The Worker that asks, where it is one of this edge's."""

    def may_ask(self, model: ModelName) -> bool:
        return self.models is None or model in self.models

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """`request` in this caller's name. Raises Forbidden."""
        if not self.may_ask(request.model):
            raise Forbidden(f"This key may not use the model {request.model!r}.", param="model")
        return msgspec.structs.replace(
            request,
            namespace=self.namespace,
            priority=max(self.tenant.priority, request.priority),
        )


class Door:
    """`book` is asked each time, so that a revocation is seen as soon as the book has it. `look`
    renews the book before a key is refused: one that was made this moment is good."""

    def __init__(
        self,
        topology: Topology,
        book: Callable[[], KeyBook],
        *,
        look: Callable[[], None] = lambda: None,
        agents: Agents | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book = book
        self._look = look
        self._agents = agents or NoAgents()
        self._clock = clock
        self._anonymous = topology.access.anonymous
        names = {ANONYMOUS, *topology.tenants}
        self._callers = {name: _caller(topology, name) for name in names}

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Raises Unauthorized. A key that is given must be good; where callers need none, what is
        not a key of ours ("none", "EMPTY": clients insist on something) counts as none."""
        token = headers.get(WORKER_HEADER)
        if token is not None:
            return self._of_worker(token)
        key = _bearer(headers.get(b"authorization", b""))
        if self.needs_key or (key is not None and key_id(key) is not None):
            return self._of_key(key)
        return self._callers[ANONYMOUS]

    @property
    def needs_key(self) -> bool:
        """Whether callers without a key are refused."""
        if self._anonymous == "until-keys":
            return self._book().made
        return self._anonymous != "always"

    def _of_worker(self, token: bytes) -> Caller:
        agent = self._agents.of_token(token)
        caller = None if agent is None else self._callers.get(agent.tenant)
        if agent is None or caller is None:
            raise Unauthorized("No Worker of this edge asks like that.")
        if caller.name == ANONYMOUS and self.needs_key:
            raise Unauthorized(
                f"The Worker {agent.name!r} acts for callers without a key, and a key is needed"
                " now: deploy it for a tenant."
            )
        return replace(caller, worker=agent.name)

    def _of_key(self, key: str | None) -> Caller:
        if key is None:
            raise Unauthorized("An API key is needed: send 'Authorization: Bearer KEY'.")
        found = self._book().check(key, self._clock())
        if found is None and key_id(key) is not None:
            self._look()
            found = self._book().check(key, self._clock())
        if found is None:
            raise Unauthorized(f"The API key{_named(key)} is not valid.")
        caller = self._callers.get(found.tenant)
        if caller is None or found.tenant == ANONYMOUS:
            raise Unauthorized(f"The API key{_named(key)} belongs to no tenant of this world.")
        return Caller(caller.name, caller.tenant, found.id, caller.namespace, caller.models)


def _caller(topology: Topology, name: str) -> Caller:
    tenant = topology.tenants.get(name, Tenant())
    canonical = {topology.canonical_model(model) for model in tenant.models}
    return Caller(
        name=name,
        tenant=tenant,
        key_id=NO_KEY,
        namespace=topology.namespace_of(name),
        models=frozenset(model for model in canonical if model) if tenant.models else None,
    )


def _bearer(header: bytes) -> str | None:
    scheme, _, key = header.decode("latin-1").strip().partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def _named(key: str) -> str:
    """The ID only: the rest may be a good key with a slip in it."""
    name = key_id(key)
    return f" {name}" if name else ""
