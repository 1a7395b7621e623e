"""The edge's benchmark: its doubles and readers agree, and its figures are what was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from core.events import Accepted, Delta, Done, Finish, event_decoder
from core.status import status_decoder
from core.types import GenerateRequest, ModelName, RequestId, Sampling
from loadtest.edge import __main__ as bench
from loadtest.edge import clients, installed
from loadtest.edge.clients import BrokenStream, Seen
from loadtest.edge.doubles import MODEL, OpenAI, Region, chunk
from loadtest.edge.rounds import Burst, First, Paced, Samples


class _Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False


def _said(request: bytes, kind: Callable[[], Region | OpenAI]) -> bytes:
    async def run() -> bytes:
        wire, double = _Wire(), kind()
        double.connection_made(wire)
        double.data_received(request)
        double.connection_lost(None)
        return bytes(wire.sent)

    return asyncio.run(run())


def _unchunked(answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    out = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        out, rest = out + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return out


def test_the_region_double_speaks_frames() -> None:
    import msgspec

    body = msgspec.msgpack.encode(
        GenerateRequest(
            id=RequestId("r"), model=ModelName(MODEL), prompt="x", seed=0, rendered_at=0,
            sampling=Sampling(max_tokens=5),
        )
    )  # fmt: skip
    head = b"POST /internal/v1/generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    events = event_decoder().feed(_unchunked(_said(head + body, Region)))
    kinds = [type(event) for event in events]
    assert kinds == [Accepted, *[Delta] * 5, Finish, Done]
    status = _said(b"GET /internal/v1/status HTTP/1.1\r\n\r\n", Region)
    [told] = status_decoder().feed(_unchunked(status))
    assert told.region == "double"


@pytest.mark.parametrize("pause_ms", [0, 2])
def test_clients_see_what_the_double_sends(pause_ms: int) -> None:
    async def run() -> list[Seen]:
        server = await asyncio.get_running_loop().create_server(OpenAI, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await clients.play(port, clients=3, streams=2, events=7, pause_ms=pause_ms)
        finally:
            server.close()
            await server.wait_closed()

    seen = asyncio.run(run())
    assert len(seen) == 6
    for one in seen:
        assert len(one.pairs) == 7
        assert all(got >= sent for sent, got in one.pairs)
        assert one.asked <= one.first == one.pairs[0][1]
        if pause_ms:
            assert one.pairs[-1][0] - one.pairs[0][0] >= 6 * 2000 - 1000


def test_a_stream_that_lacks_an_event_is_no_measurement() -> None:
    class Short(OpenAI):
        def _generate(self, wanted: object) -> None:
            self.write(self.head + chunk(self.piece("1")) + b"0\r\n\r\n")

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Short, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await clients.play(port, clients=1, streams=1, events=2, pause_ms=0)
        finally:
            server.close()
            await server.wait_closed()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(BrokenStream, match="1 of 2 events")


def test_a_gap_counts_by_how_much_it_was_changed() -> None:
    seen = Seen(0, 10, [(0, 5_000), (20_000, 27_000), (40_000, 45_000), (60_000, 65_000)])
    assert seen.added_gaps_ms() == [2.0, 2.0, 0.0]


def _samples(*, router: bool) -> Samples:
    paced = Paced(gap_p50_ms=1, gap_p99_ms=9, cpu_us=30, resident_mb=90, kept_pace=1)
    names = ["skerry", "direct", *(["vllm-router"] if router else [])]
    return Samples(
        bursts={name: [Burst(100.0 * (1 + (name == "vllm-router")), 400)] * 3 for name in names},
        firsts={name: [First(3 - 2 * (name == "direct"), 20)] * 3 for name in names},
        paced=dict.fromkeys(names, paced),
    )


def test_figures_are_ratios_and_differences_of_the_same_rounds() -> None:
    found = {one.name: one for one in bench.figures(_samples(router=True), 70, 55)}
    ratio = found["streams/s of 64 events / vllm-router"]
    assert (ratio.value, ratio.verdict) == (0.5, "floor met")
    first = found["time to the first piece added at 16 streams, median"]
    assert (first.value, first.verdict) == (2, "target met")
    assert not any(one.fails for one in found.values())
    alone = bench.figures(_samples(router=False), 120, 55)
    assert len(alone) == len(found) - 1
    assert [one.name for one in alone if one.fails] == ["memory of an idle edge process"]


def test_the_plain_extra_is_weighed_without_the_others() -> None:
    project = Path(__file__).parents[3]
    size = installed.size_mb(project)
    assert 15 < size < 100
    names = installed._closure(["litestar>=2", "aiohttp; python_version > '3'"])
    assert {"litestar", "aiohttp", "multidict", "msgspec"} <= names
    assert "torch" not in names
