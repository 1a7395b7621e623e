"""A region for tests: the real router with real sockets, a client of it, and a text model of one
token per byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from core.config import World, parse
from core.events import Accepted, Delta, Done, Event, Finish, Moved, Placing, event_decoder
from core.telemetry import SILENT, Telemetry
from core.types import (
    FinishReason,
    GenerateRequest,
    Message,
    ModelName,
    RegionName,
    RequestId,
    Sampling,
    Tool,
    ToolChoice,
    Usage,
)  # fmt: skip
from regional.app import RouterApp
from regional.pb import node_pb2 as pb
from regional.prefixes import Prefixes
from tests.regional.fake_node import MODEL, PATIENCE_S, FakeNode

T = TypeVar("T")


def run(test: Coroutine[object, object, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await test

    return asyncio.run(bounded())


class ByteText:
    """A text model whose tokens are bytes."""

    context = 4096
    context_limit = 8192
    vocab_size = 256

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        rendered_at: int,
        at_most: int | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = ToolChoice.AUTO,
        forced_tool: str = "",
    ) -> list[int]:
        return [byte for message in messages for byte in (message.content or "").encode()]

    def encode_prompt(
        self, prompt: str | Sequence[int], *, at_most: int | None = None
    ) -> list[int]:
        return list(prompt.encode() if isinstance(prompt, str) else prompt)

    def grammar(self, request: GenerateRequest) -> str:
        return ""


def topology(
    nodes: Iterable[tuple[str, str]], *, queue: int = 64, heartbeat_s: float = 30.0
) -> str:
    """A one-region world; `nodes` are (name, role). Heartbeats hardly ever unless asked for."""
    lines = [
        "version = 1",
        f"[limits]\nqueue = {queue}\nheartbeat_s = {heartbeat_s}\nbody_bytes = 100000",
        f'[models.{MODEL}]\nsource = "package:none"\naliases = ["small", "default"]',
        '[[edges]]\nname = "edge"',
        '[[regions]]\nname = "here"\nsplit_min_tokens = 64',
    ]
    lines += [
        f'[[regions.nodes]]\nname = "{name}"\nrole = "{role}"\nmodel = "{MODEL}"'
        for name, role in nodes
    ]
    return "\n".join(lines)


def ask(
    prompt: str | tuple[int, ...] = "x" * 200,
    *,
    request_id: str = "r1",
    max_tokens: int | None = 8,
    model: str = MODEL,
    deadline_s: float = 30.0,
    priority: int = 0,
) -> GenerateRequest:
    return GenerateRequest(
        id=RequestId(request_id),
        model=ModelName(model),
        prompt=prompt,
        sampling=Sampling(max_tokens=max_tokens),
        seed=1,
        rendered_at=0,
        deadline_s=deadline_s,
        priority=priority,
    )


def delta(text: str, *token_ids: int) -> Delta:
    return Delta(text=text, token_ids=token_ids or (1,))


def ending(prompt: int = 200, generated: int = 2) -> tuple[Finish, Done]:
    usage = Usage(prompt_tokens=prompt, completion_tokens=generated)
    return Finish(reason=FinishReason.STOP), Done(usage=usage)


class Here:
    """The region under test and a client of it."""

    def __init__(self, app: RouterApp, world: World, client: aiohttp.ClientSession) -> None:
        self.app = app
        self.secret = world.secret("region")
        self.client = client
        self.nodes: list[FakeNode] = []
        self.background: list[asyncio.Task[list[Event]]] = []
        """Requests whose end the test does not wait for; cancelled when it is over."""
        self.base = f"http://127.0.0.1:{app.http_port}"
        self.headers = {"x-skerry-secret": self.secret.decode(), "x-skerry-wire": "1"}

    def node(
        self,
        name: str,
        role: str,
        react: Callable[[FakeNode, pb.RouterMessage], None] | None = None,
    ) -> FakeNode:
        """Not dialled yet."""
        port = self.app.grpc_port
        node = FakeNode(name, role, port=port, secret=self.secret, react=react)
        self.nodes.append(node)
        return node

    async def joined(
        self,
        name: str,
        role: str,
        react: Callable[[FakeNode, pb.RouterMessage], None] | None = None,
    ) -> FakeNode:
        return await self.node(name, role, react).start()

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncIterator[Stream]:
        body = msgspec.msgpack.encode(request)
        url = f"{self.base}/internal/v1/generate"
        async with self.client.post(url, data=body, headers=self.headers) as answer:
            assert answer.status == 200
            assert answer.headers["x-skerry-wire"] == "1"
            yield Stream(answer)

    async def events(self, request: GenerateRequest) -> list[Event]:
        """The whole answer."""
        async with self.stream(request) as stream:
            return await stream.rest()

    def asking(self, request: GenerateRequest) -> asyncio.Task[list[Event]]:
        return asyncio.create_task(self.events(request))

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for a state of the router; looked at whenever the router says that it changed."""
        seen = 0
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                seen, _ = await self.app.publisher.next_frame(seen)

    async def queued(self, count: int) -> None:
        await self.until(lambda: self.app.router.dispatcher.queued == count)

    async def cancel(self, request_id: str) -> int:
        url = f"{self.base}/internal/v1/cancel/{request_id}"
        async with self.client.post(url, headers=self.headers) as answer:
            return answer.status

    def at_rest(self) -> bool:
        """Nothing in flight and nothing counted anywhere."""
        router = self.app.router
        idle = all(
            (v.prefills, v.prefill_tokens, v.sequences, v.answer_tokens) == (0, 0, 0, 0)
            for v in router.cluster.view().nodes
        )
        return idle and router.active == 0 and router.dispatcher.queued == 0


class Stream:
    """An answer as it comes. `placings`: what Accepted and Moved told of what was weighed, which
    the events here come without."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.placings: list[Placing] = []
        self._decoder = event_decoder()
        self._events: list[Event] = []

    async def next(self) -> Event:
        async with asyncio.timeout(PATIENCE_S):
            while not self._events:
                data = await self.answer.content.readany()
                assert data, "the stream ended"
                self._take(data)
        return self._events.pop(0)

    async def rest(self) -> list[Event]:
        async with asyncio.timeout(40):
            while data := await self.answer.content.readany():
                self._take(data)
        assert self._decoder.pending == 0
        rest, self._events = self._events, []
        return rest

    def _take(self, data: bytes) -> None:
        for event in self._decoder.feed(data):
            if isinstance(event, Accepted | Moved) and event.placing:
                self.placings.append(event.placing)
                event = msgspec.structs.replace(event, placing=msgspec.UNSET)
            self._events.append(event)


@asynccontextmanager
async def region(
    tmp_path: Path,
    *nodes: tuple[str, str],
    queue: int = 64,
    heartbeat_s: float = 30.0,
    more: str = "",
    telemetry: Telemetry = SILENT,
) -> AsyncIterator[Here]:
    """`more`: the end of the topology."""
    text = topology(nodes, queue=queue, heartbeat_s=heartbeat_s) + more
    world = World(topology=parse(text), path=tmp_path / "world.toml", state=tmp_path)
    texts = {MODEL: ByteText()}
    app = RouterApp(world, world.topology.region("here"), texts, telemetry=telemetry)
    await app.start()
    try:
        async with aiohttp.ClientSession() as client:
            here = Here(app, world, client)
            try:
                yield here
            finally:
                for task in here.background:
                    task.cancel()
                await asyncio.gather(*here.background, return_exceptions=True)
                for node in here.nodes:
                    await node.die()
    finally:
        await app.stop()


def no_prefixes() -> Prefixes:
    """A region's prefixes for tests that are not about them."""
    return Prefixes(RegionName("here"), "e", holds=lambda _: False, share=1.0)
