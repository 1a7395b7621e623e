"""Connections between the ranks of a node: a star around each one that schedules. Over TCP,
torch-free.

A leader says its followers each step's plan, in order, and hears what they answer; a connection
that closes says that a rank has gone. Frames have four bytes of length, big-endian, whose highest
bit says that zlib has packed what follows. Who does not know the node's secret is turned away.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
import zlib
from collections.abc import Collection
from contextlib import suppress

import msgspec

from core.accepting import Spell
from core.errors import NodeLost

MEET_S = 600.0
"""Ranks that are not there after this long do not come: others may read their weights first."""
_HEAD = 4
_RETRY_S = 0.05
_HELLO_S = 5.0
_HELLO_BYTES = 4096
_MAX_BYTES = 256 << 20
_PACKED = 1 << 31
_PACKED_BYTES = 512
"""Messages from this size on are compressed."""

Address = tuple[str, int]


class _Hello(msgspec.Struct, frozen=True):
    rank: int
    secret: str


class Peer:
    """One connection to another rank. `say` may be called from several threads, `hear` from one;
    both raise NodeLost when that rank has gone."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self.rank = rank
        self._sock = sock
        self._saying = threading.Lock()

    def say(self, message: bytes) -> None:
        packed = len(message) >= _PACKED_BYTES
        if packed:  # rows of a plan are much alike
            message = zlib.compress(message, 1)
        head = len(message) | (packed * _PACKED)
        try:
            with self._saying:
                self._sock.sendall(head.to_bytes(_HEAD, "big") + message)
        except OSError as error:
            raise NodeLost(f"rank {self.rank} has gone: {error}") from error

    def hear(self) -> bytes:
        """The next message, waited for."""
        head = int.from_bytes(self._exactly(_HEAD), "big")
        size = head & ~_PACKED
        if size > _MAX_BYTES:
            raise NodeLost(f"rank {self.rank} sent a message of {size} bytes")
        message = self._exactly(size)
        return zlib.decompress(message) if head & _PACKED else message

    def detach(self) -> socket.socket:
        """The connection itself, for whoever frames its messages otherwise."""
        return self._sock

    def close(self) -> None:
        """From any thread: one that waits in `hear` is told that the rank has gone."""
        with suppress(OSError):  # the other side may have closed it already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise NodeLost(f"rank {self.rank} has gone: {error}") from error
            if not count:
                raise NodeLost(f"rank {self.rank} has gone")
            view = view[count:]
        return bytes(data)


def listen(host: str) -> socket.socket:
    """A socket for `gather`, on a free port of `host`."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def own_address(other: Address) -> str:
    """The address of this machine from which it reaches `other`."""
    family, _, _, _, place = socket.getaddrinfo(*other, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing: it only picks a route
        return str(probe.getsockname()[0])


def dial(address: Address, rank: int, me: int, secret: str, *, within_s: float = MEET_S) -> Peer:
    """Connect to `rank`, which listens at `address` or soon will. Raises NodeLost."""
    until = time.monotonic() + within_s
    while True:
        try:
            peer = Peer(rank, socket.create_connection(address, timeout=_HELLO_S))
        except OSError as error:
            if time.monotonic() > until:
                raise NodeLost(
                    f"rank {rank} is not at {address[0]}:{address[1]}: {error}"
                ) from error
            time.sleep(_RETRY_S)
            continue
        peer.say(msgspec.msgpack.encode(_Hello(me, secret)))
        return peer


def gather(
    secret: str, listener: socket.socket, ranks: Collection[int], *, within_s: float = MEET_S
) -> dict[int, Peer]:
    """A connection from each of `ranks`. Raises NodeLost when not all of them come."""
    until = time.monotonic() + within_s
    peers: dict[int, Peer] = {}
    spell = Spell("ranks")
    try:
        while missing := sorted(set(ranks) - set(peers)):
            listener.settimeout(max(_RETRY_S, until - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except TimeoutError as error:
                raise NodeLost(f"rank {', '.join(map(str, missing))} did not come") from error
            except OSError as error:
                if time.monotonic() > until:
                    names = ", ".join(map(str, missing))
                    raise NodeLost(f"rank {names} did not come: {error.strerror}") from error
                time.sleep(spell.pause_s(error))
                continue
            hello = _hello(sock)
            known = hello is not None and hmac.compare_digest(hello.secret, secret)
            if hello is None or not known or hello.rank not in missing:
                sock.close()
                continue
            peers[hello.rank] = Peer(hello.rank, sock)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return dict(sorted(peers.items()))


def _hello(sock: socket.socket) -> _Hello | None:
    """The first words on a connection; None when they are none of ours."""
    sock.settimeout(_HELLO_S)
    try:
        size = int.from_bytes(sock.recv(_HEAD, socket.MSG_WAITALL), "big")
        if not 0 < size <= _HELLO_BYTES:
            return None
        return msgspec.msgpack.decode(sock.recv(size, socket.MSG_WAITALL), type=_Hello)
    except (OSError, msgspec.MsgspecError):
        return None
