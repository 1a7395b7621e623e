"""Pools that share experts step together: every step of one is a step of all.

An exchange of tokens waits for every rank that has experts, whoever's tokens they are. So the first
leader of a node calls each step for all leaders; a pool that has nothing to compute takes part
without rows. A pool says that it wants a step; none is called for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from core.engine.crew import Peer
from core.errors import NodeLost

_WANT, _GO = b"want", b"go"
_GRACE_S = 0.005
"""Who took part in the last step gets this long to want the next one, so that all compute in the
same step and not in turns."""


class Pace(Protocol):
    """`go` of its owner is called once for each step, from a thread of this object."""

    def want(self) -> None:
        """This pool has a step to compute. Raises NodeLost."""
        ...

    def done(self) -> None:
        """This rank has computed its part of a step."""
        ...


class PaceMaker:
    """The first leader's. `lost` is called when another leader has gone."""

    def __init__(
        self,
        peers: Mapping[int, Peer],
        go: Callable[[], None],
        lost: Callable[[NodeLost], None],
    ) -> None:
        self._peers = peers
        self._go = go
        self._lost = lost
        self._changed = threading.Condition()
        self._wants: dict[int, int] = {}
        self._last: frozenset[int] = frozenset()
        self._stepping = False
        for rank, peer in peers.items():
            _thread(f"pace-{rank}", self._hear, rank, peer)
        _thread("pace", self._call)

    def want(self) -> None:
        self._wanted(_OWN)

    def done(self) -> None:
        with self._changed:
            self._stepping = False
            self._changed.notify()

    def _wanted(self, rank: int) -> None:
        with self._changed:
            self._wants[rank] = self._wants.get(rank, 0) + 1
            self._changed.notify()

    def _hear(self, rank: int, peer: Peer) -> None:
        try:
            while True:
                peer.hear()
                self._wanted(rank)
        except NodeLost as error:
            self._lost(error)

    def _call(self) -> None:
        try:
            while True:
                self._next()
                for peer in self._peers.values():
                    peer.say(_GO)
                self._go()
        except NodeLost as error:
            self._lost(error)

    def _next(self) -> None:
        """Wait until a step is to be called."""
        with self._changed:
            self._changed.wait_for(lambda: self._wants and not self._stepping)
            self._changed.wait_for(lambda: self._last <= self._wants.keys(), _GRACE_S)
            self._last = frozenset(self._wants)
            self._wants = {rank: left - 1 for rank, left in self._wants.items() if left > 1}
            self._stepping = True


class PaceKeeper:
    """Another leader's, which the first one calls."""

    def __init__(
        self, maker: Peer, go: Callable[[], None], lost: Callable[[NodeLost], None]
    ) -> None:
        self._maker = maker
        self._go = go
        self._lost = lost
        _thread("pace", self._hear)

    def want(self) -> None:
        self._maker.say(_WANT)

    def done(self) -> None:
        """The first leader's own part is what its calls wait for: all end together."""

    def _hear(self) -> None:
        try:
            while True:
                self._maker.hear()
                self._go()
        except NodeLost as error:
            self._lost(error)


_OWN = -1


def _thread(name: str, work: Callable[..., None], *arguments: object) -> None:
    """One that ends with the connection that it listens to, or with the process."""
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()
