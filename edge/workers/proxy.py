"""One request passed on to a Worker's process, and its answer passed back as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterable
from urllib.parse import quote

import aiohttp
import msgspec
from litestar.types import HTTPScope, Send
from multidict import CIMultiDict
from yarl import URL

from core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NoCapacity,
    RequestError,
    WorkerFailed,
)
from edge.api.exchange import refusal_headers
from edge.api.openai_render import error_body
from edge.workers.runtime import CF_HEADER, SCHEME_HEADER, THREW_HEADER
from edge.workers.shared_origin import tamed
from edge.workers.table import Entry
from edge.workers.upload import Upload

_log = logging.getLogger("skerry.workers")
_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding"
    b" upgrade expect".split()
)
_OURS = b"x-skerry-"
_HOST = re.compile(rb"([a-z0-9_.~%-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
CONNECT_S = 20.0
"""A process that is being started answers once it is up."""
IDLE_S = 3.0
"""Less than workerd keeps idle connections for: a request never meets the end of one."""
HEAD_BYTES, HEAD_FIELDS = 128 << 10, 4096
"""Of an answer, all its headers together:
https://developers.cloudflare.com/workers/platform/limits/."""
_SANDBOX = (b"content-security-policy", b"sandbox allow-scripts allow-forms allow-popups")
_RUNTIME_SAYS = {
    "did not resolve to 'Response'": "returned something that is no Response",
    "would never generate a response": "can never answer: it waits for a promise that nothing"
    " settles",
    "Array buffer allocation failed": "filled its memory (workers.memory_mb)",
}
"""What is said of a Worker by its runtime, and what callers may be told of it."""
_HEAD = (
    f"answered with headers that cannot be passed on: all of them together may have"
    f" {HEAD_BYTES >> 10} KiB, and {HEAD_FIELDS} may be given"
)
_RETURNED = re.compile(r"fetch returned (a \w{1,40}|None), not a Response")
"""Said by the runtime of Python Workers."""


class _Thrown(msgspec.Struct):
    name: str = "Error"
    message: str = ""


class Upstream:
    """Connections to the process of one version of a Worker."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.running = 0
        self.retired = False
        """Nobody comes any more; closed with the last one who is there."""
        self._touched = 0.0
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(entry.socket, limit=0, keepalive_timeout=IDLE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=64 << 10,
            max_field_size=HEAD_BYTES,
            max_headers=HEAD_FIELDS,
        )
        self._session._retry_connection = False  # what made a Worker end must not be sent again

    def touch(self, now: float) -> None:
        """Tell the host that it is used, from time to time."""
        if now - self._touched > self.entry.touch_s:
            self._touched = now
            try:
                os.utime(self.entry.used)
            except FileNotFoundError:
                return  # it was replaced just now

    @property
    def session(self) -> aiohttp.ClientSession:
        return self._session

    async def close(self) -> None:
        await self._session.close()


class Passage:
    """One exchange. `path` is what the Worker sees, `shared` says that it answers on the edge's own
    origin: a page must not act there as if it were ours."""

    def __init__(self, edge: str, upstream: Upstream, *, path: bytes, shared: bool) -> None:
        self._edge = edge
        self._upstream = upstream
        self._entry = upstream.entry
        self._path = path
        self._shared = shared
        self._base = f"/w/{self._entry.name}".encode()
        self._started = False

    async def __call__(self, scope: HTTPScope, upload: Upload, send: Send) -> bool:
        """Whether somebody was there: if not, nothing has been sent to either side."""
        upstream = self._upstream
        upstream.touch(time.monotonic())
        upstream.running += 1
        try:
            if upstream.running > self._entry.concurrency:
                raise NoCapacity(
                    f"the Worker {self._entry.name!r} has {self._entry.concurrency} requests under"
                    " way here (workers.concurrency)",
                    retry_after_s=1.0,
                )
            await self._pass(scope, upload, send)
        except aiohttp.ClientConnectorError:
            return False
        except Cancelled:
            return True
        except RequestError as error:
            if not self._started:  # else the connection ends before its answer does
                await refuse(send, error)
        finally:
            upstream.running -= 1
            upstream.touch(time.monotonic())
            if upstream.retired and not upstream.running:
                await upstream.close()
        return True

    def absent(self) -> WorkerFailed:
        """What is said where nobody came in time."""
        return self._failed("is not running here")

    async def _pass(self, scope: HTTPScope, upload: Upload, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None, "runs in a task"
        watcher = asyncio.create_task(upload.left())
        left = False

        def leave(_: asyncio.Task[None]) -> None:
            nonlocal left
            if not watcher.cancelled() and not left:
                left = True
                task.cancel()

        watcher.add_done_callback(leave)
        try:
            await self._exchange(scope, upload, send)
        except asyncio.CancelledError:
            if left and task.uncancel() == 0:
                raise Cancelled("the caller left") from None
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the Worker {self._entry.name!r} did not answer within"
                f" {self._entry.answer_s:g} s (workers.answer_s); see `skerry worker tail"
                f" {self._entry.name}`"
            ) from error
        except aiohttp.ClientConnectorError:
            raise  # there is nobody
        except aiohttp.ClientResponseError as error:  # its head cannot be read
            _log.warning("worker's head refused name=%s why=%s", self._entry.name, error.message)
            raise self._failed(_HEAD) from error
        except (aiohttp.ClientError, OSError) as error:
            if upload.error is not None:
                raise upload.error from error
            _log.warning("worker broke off name=%s why=%r", self._entry.name, error)
            raise self._failed("ended while it answered") from error
        finally:
            left = True
            watcher.cancel()
            await asyncio.wait({watcher})

    async def _exchange(self, scope: HTTPScope, upload: Upload, send: Send) -> None:
        data: bytes | AsyncIterator[bytes] | None = None
        if upload.has_body:
            data = await upload.whole() if upload.small else upload.pieces()
        async with asyncio.timeout(self._entry.answer_s) as limit:
            answer = await self._upstream.session.request(
                scope["method"],
                URL(_url(scope, self._path), encoded=True),  # the host is said by its header alone
                headers=self._headers(scope),
                data=data,
                allow_redirects=False,
            )
            limit.reschedule(None)
        async with answer:
            if THREW_HEADER in answer.headers:
                raise self._threw(await answer.read())
            if sum(len(name) + len(value) for name, value in answer.raw_headers) > HEAD_BYTES:
                raise self._failed(_HEAD)
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": list(self._answer_headers(answer)),
                }
            )
            self._started = True
            async for piece in answer.content.iter_any():
                self._upstream.touch(time.monotonic())
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _headers(self, scope: HTTPScope) -> CIMultiDict[str]:
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in scope["headers"]:
            if name == b"host" and not _HOST.fullmatch(value):
                raise InvalidRequest("The Host header is no host with or without a port.")
            if name not in _HOP and not name.startswith(_OURS):
                headers.add(name.decode("latin-1"), value.decode("latin-1"))
        client = scope.get("client")
        if client is not None:
            headers["cf-connecting-ip"] = client[0]
        headers[SCHEME_HEADER] = scope["scheme"]
        headers[CF_HEADER] = json.dumps({"colo": self._edge.upper()[:3], "edge": self._edge})
        return headers

    def _answer_headers(self, answer: aiohttp.ClientResponse) -> Iterable[tuple[bytes, bytes]]:
        for raw, value in answer.raw_headers:
            name = raw.lower()
            if name in _HOP:
                continue
            kept = tamed(name, value, self._base) if self._shared else value
            if kept is not None:
                yield name, kept
        yield b"x-skerry-worker-version", f"{self._entry.name}/{self._entry.version}".encode()
        if self._shared:  # beside a policy of the Worker's own: browsers hold to both
            yield _SANDBOX

    def _threw(self, body: bytes) -> WorkerFailed:
        try:
            thrown = msgspec.json.decode(body, type=_Thrown)
        except msgspec.MsgspecError:
            thrown = _Thrown()
        for sign, what in _RUNTIME_SAYS.items():
            if sign in thrown.message:
                return self._failed(what)
        if (found := _RETURNED.match(thrown.message)) is not None:
            return self._failed(
                f"returned {found[1]}, not a Response: fetch has to end in `return Response(…)` or"
                " `return Response.json(…)`"
            )
        if not self._entry.open:
            return self._failed("threw an exception")
        return self._failed(f"threw {thrown.name}: {thrown.message}")

    def _failed(self, what: str) -> WorkerFailed:
        name = self._entry.name
        return WorkerFailed(f"the Worker {name!r} {what}; see `skerry worker tail {name}`")


def _url(scope: HTTPScope, path: bytes) -> str:
    safe = quote(path.decode("latin-1"), safe="/%:@!$&'()*+,;=~-._?[]|")
    query = scope["query_string"].decode("latin-1")
    return f"http://worker{safe}{'?' + query if query else ''}"


async def refuse(send: Send, error: RequestError) -> None:
    """Answer with a refusal of ours."""
    body = error_body(error)
    await send(
        {
            "type": "http.response.start",
            "status": error.http_status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *refusal_headers(error),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})
