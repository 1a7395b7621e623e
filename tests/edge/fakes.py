"""A region that speaks the frame protocol over real sockets, and a real edge server on port 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import uvicorn
from aiohttp import web

from core.config import World, parse
from core.errors import RegionUnavailable, RequestError
from core.events import Accepted, Delta, Done, Event, Fault, Finish, encode_frame
from core.status import ModelStatus, NodeStatus, RegionStatus, Told
from core.types import (
    FinishReason,
    GenerateRequest,
    ModelName,
    NodeName,
    RegionName,
    RequestId,
    Role,
    Timings,
    Usage,
)
from edge.admission import Admission
from edge.app import open_edge
from edge.listener import guarding
from edge.server import Server

SECRET = "a-region-secret-for-tests"
MODEL = ModelName("tiny")
USAGE = Usage(prompt_tokens=12, completion_tokens=3, cached_tokens=8)
TIMINGS = Timings(queue_s=0.001, prefill_s=0.02, decode_s=0.03, transfer_s=0.004, kv_bytes=4096)


@dataclass(frozen=True)
class Cut:
    """A step of a script: the connection breaks."""


@dataclass(frozen=True)
class Hold:
    """A step of a script: nothing comes until `gate` is set."""

    gate: asyncio.Event


OPEN = 'anonymous = "until-keys"'

Step = Event | Cut | Hold | tuple[Event, ...]
Script = Callable[[GenerateRequest], Iterable[Step]]


def accepted(region: str) -> Accepted:
    return Accepted(
        prefill=NodeName(f"{region}-prefill-1"),
        decode=NodeName(f"{region}-decode-1"),
        prompt_tokens=USAGE.prompt_tokens,
        reason="split",
    )


def delta(text: str, token: int = 1) -> Delta:
    return Delta(token_ids=(token,), text=text)


END: tuple[Event, ...] = (
    Finish(reason=FinishReason.STOP),
    Done(usage=USAGE, timings=TIMINGS),
)


def saying(*texts: str) -> Script:
    """A script that says `texts`, one delta each."""
    return lambda _: [*(delta(text) for text in texts), *END]


def status_of(region: str, *, sequence: int = 1, epoch: str = "e1") -> RegionStatus:
    return RegionStatus(
        region=RegionName(region),
        epoch=epoch,
        sequence=sequence,
        models=(ModelStatus(name=MODEL, context=512),),
        nodes=(
            NodeStatus(
                name=NodeName(f"{region}-decode-1"),
                role=Role.DECODE,
                model=MODEL,
                blocks_used=5,
                blocks_cached=7,
                blocks_total=100,
                generated_tokens=42,
            ),
        ),
        active=2,
    )


@dataclass
class FakeRegion:
    """`script` says what a generation does after `Accepted`; the rest is what was seen."""

    name: str
    script: Script = field(default_factory=lambda: saying("Hello", " there", "!"))
    accepts: bool = True
    """False: the script writes its own first event."""
    refuses_with: int = 0
    status: RegionStatus | None = None
    beat_s: float | None = 0.5
    """How often the same status is told again. None: only what changed; then it counts as silent
    after a while."""
    address: str = ""
    more: list[web.RouteDef] = field(default_factory=list)
    """Routes beside those of generations and status."""
    requests: list[GenerateRequest] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    left: dict[str, asyncio.Event] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, status: RegionStatus) -> None:
        """Send another status frame to whoever listens."""
        self.status = status
        self._changed.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeRegion]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/internal/v1/generate", self._generate)
        app.router.add_post("/internal/v1/cancel/{id}", self._cancel)
        app.router.add_get("/internal/v1/status", self._status)
        app.add_routes(self.more)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _open(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("x-skerry-secret") != SECRET:
            raise web.HTTPForbidden(text='{"error": "secret"}', content_type="application/json")
        response = web.StreamResponse(
            headers={"content-type": "application/x-skerry-frames", "x-skerry-wire": "1"}
        )
        await response.prepare(request)
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.refuses_with:
            return web.Response(status=self.refuses_with)
        asked = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        self.requests.append(asked)
        left = self.left.setdefault(asked.id, asyncio.Event())
        response = await self._open(request)
        try:
            if self.accepts:
                await response.write(encode_frame(accepted(self.name)))
            for step in self.script(asked):
                if isinstance(step, Cut):
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if isinstance(step, Hold):
                    await step.gate.wait()
                    continue
                events = step if isinstance(step, tuple) else (step,)
                await response.write(b"".join(encode_frame(event) for event in events))
        except (asyncio.CancelledError, ConnectionResetError):
            left.set()
            raise
        return response

    async def _cancel(self, request: web.Request) -> web.Response:
        self.cancels.append(request.match_info["id"])
        return web.Response(status=204)

    async def _status(self, request: web.Request) -> web.StreamResponse:
        response = await self._open(request)
        while True:
            self._changed.clear()
            status = self.status or status_of(self.name)
            await response.write(encode_frame(status))
            with suppress(TimeoutError):
                async with asyncio.timeout(self.beat_s):
                    await self._changed.wait()


def world_of(
    tmp_path: Path,
    *regions: FakeRegion,
    more: str = "",
    limits: str = "",
    access: str = OPEN,
) -> World:
    """A world with edges `here` and `there` and the given regions, `tiny` in each of them."""
    (tmp_path / "region.secret").write_text(SECRET)
    (tmp_path / "fleet.secret").write_text("a-fleet-secret-for-tests")
    trips = {"here": 10, "there": 90}
    text = f"""
version = 1
[routing]
expose_nodes = true
{more}
[limits]
{limits}
[access]
{access}
[models.tiny]
source = "tiny.gguf"
aliases = ["@cf/acme/tiny", "default"]
"""
    for edge, first in trips.items():
        rtt = ", ".join(f"{r.name} = {abs(first - 80 * i)}" for i, r in enumerate(regions))
        text += f'[[edges]]\nname = "{edge}"\nround_trip_ms = {{ {rtt} }}\n'
    text += 'listen = "127.0.0.1:0"\n'
    for region in regions:
        text += f'[[regions]]\nname = "{region.name}"\nhttp = "{region.address}"\n'
        text += f'[[regions.nodes]]\nname = "{region.name}-decode-1"\nrole = "combined"\n'
        text += 'model = "tiny"\n'
    (tmp_path / "world.toml").write_text(text)
    return World(topology=parse(text), path=tmp_path / "world.toml", state=tmp_path)


@dataclass(frozen=True)
class RunningEdge:
    url: str
    http: httpx.AsyncClient
    admission: Admission

    async def settled(self, regions: int) -> None:
        """Until that many regions are fresh in the edge's eyes."""
        async with asyncio.timeout(30):
            while True:
                page = (await self.http.get("/status")).json()
                if sum(one["state"] == "fresh" for one in page["regions"]) == regions:
                    return


@asynccontextmanager
async def running_edge(
    world: World, name: str = "here", *, heartbeat_s: float = 10.0, limit: int = 64, fresh: int = -1
) -> AsyncIterator[RunningEdge]:
    """The edge behind a real uvicorn; ready once `fresh` regions (all by default) are heard."""
    admission = Admission(limit)
    async with open_edge(world, name, admission=admission, heartbeat_s=heartbeat_s) as app:
        guard = guarding(head_s=world.topology.limits.head_s)
        config = uvicorn.Config(app, http=guard, port=0, log_config=None, access_log=False)
        server = Server(config)
        serving = asyncio.create_task(server.serve())
        async with asyncio.timeout(30):
            while not server.started:
                await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        try:
            async with httpx.AsyncClient(
                base_url=url, timeout=60, trust_env=False, verify=False
            ) as http:
                edge = RunningEdge(url, http, admission)
                await edge.settled(len(world.topology.regions) if fresh < 0 else fresh)
                yield edge
        finally:
            server.should_exit = True
            await serving


class MemoryRegion:
    """The in-memory twin of a RegionClient. `script` may hold RequestErrors, which are raised."""

    def __init__(self, name: str, script: Callable[[], Iterable[Event | RequestError]]) -> None:
        self.name = name
        self.script = script
        self.asked: list[GenerateRequest] = []
        self.cancelled: list[RequestId] = []
        self.order: list[str] = []
        self.at_once = False
        """One read brings all of the script."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Event], None]:
        self.asked.append(request)
        self.order.append("ask")
        if self.at_once:
            yield [step for step in self.script() if not isinstance(step, RequestError)]
            return
        for step in self.script():
            await asyncio.sleep(0)
            if isinstance(step, RequestError):
                raise step
            yield [step]

    async def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)
        self.order.append("cancel")

    async def ping(self) -> float:
        raise RegionUnavailable("no way is measured in memory")

    async def statuses(self) -> AsyncGenerator[Told, None]:
        while True:  # a region that says nothing for a while counts as silent
            yield status_of(self.name)
            await asyncio.sleep(0.5)


def chat(content: str = "Hi", **more: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def fault(code: str, message: str = "it broke", **more: object) -> Fault:
    return msgspec.convert({"kind": "fault", "code": code, "message": message, **more}, Fault)
