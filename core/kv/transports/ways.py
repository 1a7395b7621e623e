"""What a node front builds of all this: the landings it offers, and a carrier for each pool."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from core.errors import ConfigError
from core.kv.shards import PoolMemory
from core.kv.transports import mooncake, shared
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import MOONCAKE, SHARED_MEMORY, TCP, TCP_TLS, Carrier, Landing
from core.kv.transports.choose import ChoosingCarrier, Landings
from core.kv.transports.fan import FanCarrier
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.kv.transports.words import Words
from core.tls import Credentials

KINDS = (SHARED_MEMORY, TCP)
"""What a node uses unless its topology says otherwise, the preferred first."""


def check(kinds: Sequence[str]) -> None:
    """Raises ConfigError where one of them lacks what it is built on."""
    if MOONCAKE in kinds:
        mooncake.load()


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of the data sockets. With them nothing goes over TCP in the clear, and Mooncake,
    which cannot encrypt, is refused."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def of(cls, credentials: Credentials | None) -> Tls | None:
        """Those of a process; None where its world speaks plaintext."""
        return None if credentials is None else cls(credentials.server, credentials.client)


class Ways:
    """The ways `kinds`, in order of preference. Build it on the event loop; `close` when nothing is
    under way."""

    def __init__(
        self,
        host: str,
        kinds: Sequence[str] = KINDS,
        *,
        clock: Callable[[], float],
        tls: Tls | None = None,
    ) -> None:
        """Raises ConfigError when one of them is not to be had here."""
        self._kinds = tuple(kinds)
        self._tls = tls
        self._stack = ExitStack()
        self._words = Words()
        self._stack.callback(self._words.close)
        self._engine: mooncake.Engine | None = None
        self._words_base = 0
        awaited = Awaited()
        landings: list[Landing] = []
        try:
            self._lifeline = self._pipe()
            for kind in self._kinds:
                landing = self._listen(kind, host, clock, awaited)
                if landing is not None:
                    landings.append(landing)
        except BaseException:
            self._stack.close()
            raise
        if not landings:
            self._stack.close()
            raise ConfigError(f"none of the transports {', '.join(self._kinds)} works here")
        self.landing: Landing = Landings(landings)

    def carrier(self, memory: PoolMemory) -> Carrier:
        """Sends what `memory` holds. Raises ConfigError."""
        carriers: dict[str, Carrier] = {}
        for kind in self._kinds:
            if kind == TCP and self._tls is None:
                carriers[TCP] = TcpCarrier()
            elif kind == TCP and self._tls is not None:
                carriers[TCP_TLS] = TcpCarrier(tls=self._tls.client)
            elif kind == SHARED_MEMORY and shared.supported():
                carrier = shared.SharedCarrier(memory, self._words, self._lifeline)
                self._stack.callback(carrier.close)
                carriers[kind] = carrier
            elif kind == MOONCAKE and self._engine is not None:
                carriers[kind] = mooncake.MooncakeCarrier(
                    self._engine, memory, self._words, self._words_base
                )
        return FanCarrier(ChoosingCarrier(carriers, shared.host_identity()))

    def close(self) -> None:
        self._stack.close()

    def _listen(
        self, kind: str, host: str, clock: Callable[[], float], awaited: Awaited
    ) -> Landing | None:
        """None: this machine does not have it, and need not."""
        try:
            if kind == TCP:
                server = self._tls.server if self._tls else None
                tcp = TcpLanding.listen(host, clock, awaited, server)
                self._stack.callback(tcp.close)
                return tcp
            if kind == MOONCAKE:
                return self._listen_mooncake(host, clock, awaited)
            if not shared.supported():
                return None
            landing, way = shared.listen(clock, awaited)
            self._stack.callback(way.close)
            self._stack.callback(landing.close)
            return landing
        except OSError as error:
            raise ConfigError(f"host {host!r}: cannot listen: {error}") from error

    def _listen_mooncake(self, host: str, clock: Callable[[], float], awaited: Awaited) -> Landing:
        """Raises ConfigError, OSError."""
        if self._tls is not None:
            raise ConfigError("transport mooncake cannot encrypt, and this node has certificates")
        self._engine = mooncake.Engine(mooncake.start(host), host)
        self._stack.callback(self._engine.close)
        self._words_base = self._engine.register(memoryview(self._words.memory))
        landing = mooncake.listen(self._engine, host, clock, awaited)
        self._stack.callback(landing.close)
        return landing

    def _pipe(self) -> int:
        """The reading end; what it leads to is held until the end of this process."""
        reading, writing = os.pipe()
        self._stack.callback(os.close, writing)
        self._stack.callback(os.close, reading)
        return reading
