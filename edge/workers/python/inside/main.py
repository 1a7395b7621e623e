"""`python -m edge.workers.python.inside.main SETTINGS`: one Python Worker, until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import api, console
from .ai import Ai
from .bindings import Fetcher, Namespace
from .context import Background, Call, Context, enter
from .fence import raise_fence
from .handlers import Handlers, load, make_known
from .headers import Headers
from .messages import Request, Response
from .outside import Outside
from .server import Server
from .streams import ReadableStream
from .values import wrap

CF_HEADER = "x-skerry-cf"
SCHEME_HEADER = "x-skerry-scheme"
THREW_HEADER = "x-skerry-worker-threw"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the host wrote for this process. `listener` and `control` are open descriptors."""

    root: str
    entry: str
    listener: int
    control: int
    outside: str
    mark: str
    vars: dict[str, Any]
    secrets: dict[str, str]
    ai: str | None
    kv: list[str]
    services: list[str]


class Worker:
    """Answers the two sockets."""

    def __init__(self, settings: Settings, handlers: Handlers) -> None:
        self._settings = settings
        self._handlers = handlers
        self._outside = Outside(Path(settings.outside))
        self._background = Background(failed=self._left_behind)
        self._known = asyncio.Event()

    async def serve(self, listener: socket.socket, control: socket.socket) -> None:
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            ending.set()
            self._known.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        requests, questions = Server(self.answer), Server(self.asked)
        async with await asyncio.start_unix_server(questions.connected, sock=control):
            await self._known.wait()  # the host limits what it has heard of
            doors = await asyncio.start_unix_server(requests.connected, sock=listener)
            await ending.wait()
            doors.close()
            await requests.settle()
            await self._background.settle()
            await questions.settle()

    async def answer(self, request: Request) -> Response:
        """The Worker's response; what it throws as the answer that the edge knows by its mark."""
        if (cf := request.headers.get(CF_HEADER)) is not None:
            request.cf = wrap(json.loads(cf))
            request.headers.delete(CF_HEADER)
        if (scheme := request.headers.get(SCHEME_HEADER)) is not None:
            request.url = f"{scheme}:{request.url.partition(':')[2]}"
            request.headers.delete(SCHEME_HEADER)
        context = Context(self._background)
        enter(Call(self._outside, context))
        try:
            response = await self._handlers.fetch(request, api.env, context)
        except Exception as error:  # noqa: BLE001  # whatever a Worker throws
            _end_if_full(error)
            self._run(request, 500, error)
            told = {"name": type(error).__name__, "message": str(error)}
            return Response(
                json.dumps(told), 500, headers=Headers({THREW_HEADER: self._settings.mark})
            )
        stream = response._source
        if isinstance(stream, ReadableStream):
            response._source = ReadableStream(self._followed(stream, request, response.status))
        else:
            self._run(request, response.status)
        return response

    async def asked(self, request: Request) -> Response:
        """By the host: whether it is alive, and to run what is due."""
        self._known.set()
        if not request.url.endswith("/scheduled"):
            return Response("ok")
        due = await request.json()
        context = Context(self._background)
        enter(Call(self._outside, context))
        error: Exception | None = None
        try:
            await self._handlers.scheduled(due["cron"], due["time"], api.env, context)
        except Exception as raised:  # noqa: BLE001  # whatever a Worker throws
            _end_if_full(raised)
            error = raised
        self._note(cron=due["cron"], error=error)
        return Response.from_json({"outcome": "exception" if error else "ok"})

    async def _followed(
        self, stream: ReadableStream, request: Request, status: int
    ) -> AsyncIterator[bytes]:
        """The stream of an answer, with its end told."""
        try:
            async for piece in stream:
                yield piece
        except Exception as error:
            _end_if_full(error)
            self._run(request, status, error)
            raise ConnectionAbortedError("the Worker failed in the middle of its answer") from error
        else:
            self._run(request, status)

    def _left_behind(self, error: BaseException) -> None:
        console.say("error", f"waitUntil: {console.stack_of(error, self._settings.root)}")

    def _run(self, request: Request, status: int, error: Exception | None = None) -> None:
        self._note(method=request.method.value, url=request.url, status=status, error=error)

    def _note(self, *, error: Exception | None, **told: Any) -> None:
        run: dict[str, Any] = {"outcome": "ok", **told}
        if error is not None:
            run["outcome"] = "exception"
            places = console.places_of(error, self._settings.root)
            run["exceptions"] = [
                {"name": type(error).__name__, "message": str(error), "stack": places}
            ]
        console.say("log", f"{self._settings.mark} {json.dumps(run)}")


def _end_if_full(error: BaseException) -> None:
    """Memory that ran out can be missing anywhere by now: only a new process is whole."""
    if isinstance(error, MemoryError):
        console.say("fatal", OUT_OF_MEMORY)
        os._exit(1)


def _environment(settings: Settings) -> dict[str, Any]:
    outside = Outside(Path(settings.outside))
    found: dict[str, Any] = {name: wrap(value) for name, value in settings.vars.items()}
    found |= settings.secrets
    found |= {name: Namespace(outside, name) for name in settings.kv}
    found |= {name: Fetcher(outside, name) for name in settings.services}
    if settings.ai is not None:
        found[settings.ai] = Ai(outside)
    return found


def main() -> int:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    console.take_over()
    control = socket.socket(fileno=settings.control)
    listener = socket.socket(fileno=settings.listener)
    listener.setblocking(False)
    make_known()
    api.env.__dict__.update(_environment(settings))
    os.chdir(settings.root)
    raise_fence(settings.outside)
    try:
        handlers = load(Path(settings.root), settings.entry)
    except Exception as error:  # noqa: BLE001  # whatever a Worker throws
        _end_if_full(error)
        console.say("fatal", _why(error, settings.root))
        return 1
    asyncio.run(Worker(settings, handlers).serve(listener, control))
    return 0


def _why(error: Exception, root: str) -> str:
    stack = console.stack_of(error, root)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"{stack}\nPython Workers have the standard library and their own files here, and"
            f" {error.name!r} is neither"
        )
    return stack


if __name__ == "__main__":
    sys.exit(main())
