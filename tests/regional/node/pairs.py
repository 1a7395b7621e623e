"""A prefill front and a decode front, and a real data socket between them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from core.kv.handoff import Phase
from core.kv.transports.base import Arrival
from core.kv.transports.tcp_send import TcpCarrier
from tests.regional.node.desk import (
    answer_text,
    prefill,
    reserve,
    start,
    work,
)
from tests.regional.node.fake_rank import GEOMETRY
from tests.regional.node.fakes import FakeNode, fake_node

PROMPT = tuple(n % 256 for n in range(150))
BLOCK_BYTES = sum(group.block_bytes for group in GEOMETRY.groups)
Test = Callable[[FakeNode, FakeNode], Awaitable[None]]


def on_two_nodes(test: Test, *, lease_s: float = 30.0, carrier: TcpCarrier | None = None) -> None:
    """Run `test(reader, writer)`; whatever happened, both nodes must hold nothing at the end."""

    async def go() -> None:
        async with fake_node(carrier=carrier) as reader, fake_node(lease_s=lease_s) as writer:
            await test(reader, writer)
            await reader.until_empty()
            await writer.until_empty()

    asyncio.run(go())


async def hand_over(
    reader: FakeNode, writer: FakeNode, name: str, prompt: Sequence[int] = PROMPT
) -> None:
    """Reserve on one node, prefill on the other, as far as the first messages go."""
    writer.say(reserve(name, work(prompt)))
    reserved = await writer.desk.reserved(name)
    reader.say(prefill(name, work(prompt), reserved.ticket))


async def receiving(writer: FakeNode) -> Arrival:
    """The one transfer of a node, once its sender is connected."""
    arrivals = writer.landing.awaited._arrivals  # type: ignore[attr-defined] # there is no public view
    async with asyncio.timeout(30):
        while not arrivals or next(iter(arrivals.values())).incoming.phase is Phase.RESERVED:
            await asyncio.sleep(0)
    arrival: Arrival = next(iter(arrivals.values()))
    return arrival


async def say_until_refused(sock: socket.socket, data: bytes) -> None:
    while True:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        await asyncio.sleep(0)


async def succeed(reader: FakeNode, writer: FakeNode, name: str) -> None:
    await hand_over(reader, writer, name)
    writer.say(start(name))
    assert answer_text(await writer.desk.ended(name)) == "hello"
