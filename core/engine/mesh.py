"""Small tensors between the ranks of a group on CPUs: a socket to each, without a thread between.

What gloo hands from thread to thread takes milliseconds where more ranks than cores are at work;
here the thread that computes writes and reads itself. A sum is made in two rounds, each rank adding
up its own part, so that no byte more is sent than by the best ring and all ranks get the same bits.

But for `swap` only for what fits the sockets' buffers: everybody writes first and reads then.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from core.engine.crew import Address, dial, gather, listen
from core.errors import NodeLost

SMALL_BYTES = 64 << 10
"""Of a whole message. A rank may be one call ahead of another, so buffers hold two of them."""
_BUFFER_BYTES = 4 * SMALL_BYTES


class Mesh:
    """Tensors on a CPU, contiguous, no larger than `SMALL_BYTES` but for `swap`. For one thread.
    Every method raises NodeLost when a peer has gone."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._size = len(sockets) + 1
        self._others = sorted(sockets)
        self._sockets = sockets
        for sock in sockets.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    def sum(self, x: Tensor) -> None:
        """In place; x [n], of the same size on all ranks."""
        edges = [len(x) * rank // self._size for rank in range(self._size + 1)]
        parts = [x[first:last] for first, last in itertools.pairwise(edges)]
        own = parts[self._rank]
        for rank in self._others:
            self.send(parts[rank], rank)
        given = [self.receive(torch.empty_like(own), rank) for rank in self._others]
        for part in given:
            own += part
        for rank in self._others:
            self.send(own, rank)
        for rank in self._others:
            self.receive(parts[rank], rank)

    def gather(self, out: Tensor, x: Tensor) -> None:
        """out [size, n] gets what each rank gives, x [n]."""
        for rank in self._others:
            self.send(x, rank)
        out[self._rank] = x
        for rank in self._others:
            self.receive(out[rank], rank)

    def swap(self, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """`given[r]` goes to rank r, `wanted[r]` is filled with what comes from it; of any size."""
        wanted[self._rank].copy_(given[self._rank])
        going = {rank: _bytes(given[rank]) for rank in self._others if given[rank].numel()}
        coming = {rank: _bytes(wanted[rank]) for rank in self._others if wanted[rank].numel()}
        while going or coming:
            readable, writable, _ = select.select(
                [self._sockets[rank] for rank in coming],
                [self._sockets[rank] for rank in going],
                [],
            )
            for rank in self._others:
                sock = self._sockets[rank]
                try:
                    if sock in writable:
                        _move(going, rank, sock.send(going[rank], socket.MSG_DONTWAIT))
                    if sock in readable:
                        count = sock.recv_into(coming[rank], 0, socket.MSG_DONTWAIT)
                        if not count:
                            raise NodeLost("a peer rank has gone")
                        _move(coming, rank, count)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise NodeLost(f"a peer rank has gone: {error}") from error

    def send(self, x: Tensor, to: int) -> None:
        if x.numel():
            try:
                self._sockets[to].sendall(_bytes(x))
            except OSError as error:
                raise NodeLost(f"a peer rank has gone: {error}") from error

    def receive(self, out: Tensor, source: int) -> Tensor:
        """Fill `out`, which has the size of what `source` sends next."""
        if out.numel():
            view = _bytes(out)
            while view:
                try:
                    count = self._sockets[source].recv_into(view)
                except OSError as error:
                    raise NodeLost(f"a peer rank has gone: {error}") from error
                if not count:
                    raise NodeLost("a peer rank has gone")
                view = view[count:]
        return out

    def close(self) -> None:
        """From any thread: whoever waits for a peer is told that it has gone."""
        for sock in self._sockets.values():
            with suppress(OSError):  # the other side may have closed it already
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Addresses(Protocol):
    """Where each member of a group listens."""

    def tell(self, member: int, address: Address) -> None: ...

    def hear(self, member: int) -> Address:
        """Waits until it has told."""
        ...


def connect(members: Sequence[int], rank: int, host: str, secret: str, store: Addresses) -> Mesh:
    """The mesh of `members`, all of which call this. Raises NodeLost when one does not come."""
    at = members.index(rank)
    with listen(host) as listener:
        store.tell(at, (host, listener.getsockname()[1]))
        peers = {other: dial(store.hear(other), members[other], at, secret) for other in range(at)}
        peers |= gather(secret, listener, range(at + 1, len(members)))
    return Mesh(at, {other: peer.detach() for other, peer in peers.items()})


def _move(views: dict[int, memoryview], rank: int, count: int) -> None:
    """So much of it is done."""
    if count == len(views[rank]):
        del views[rank]
    else:
        views[rank] = views[rank][count:]


def _bytes(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data
