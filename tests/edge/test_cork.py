"""A head waits for what follows it, and for nothing else."""

from __future__ import annotations

import asyncio

from edge.cork import Corked


class _Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.ended = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


async def test_head_and_first_part_are_one_piece_and_the_rest_is_not_delayed() -> None:
    wire = _Wire()
    corked = Corked(wire)
    corked.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert wire.sent == []
    corked.write(b"a")
    corked.write(b"b")
    assert wire.sent == [b"HTTP/1.1 200 OK\r\n\r\na", b"b"]
    await asyncio.sleep(0)
    assert len(wire.sent) == 2


async def test_a_head_alone_goes_out_in_the_next_turn_or_before_the_end() -> None:
    wire = _Wire()
    corked = Corked(wire)
    corked.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    await asyncio.sleep(0)
    corked.write(b"HTTP/1.1 304 Not Modified\r\n\r\n")
    corked.close()
    assert wire.sent == [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\n\r\n"]
    assert wire.ended == "closed"


async def test_nothing_follows_an_abort() -> None:
    wire = _Wire()
    corked = Corked(wire)
    corked.write(b"HTTP/1.1 200 OK\r\n\r\n")
    corked.abort()
    await asyncio.sleep(0)
    assert (wire.sent, wire.ended, corked.is_closing()) == ([], "aborted", True)
