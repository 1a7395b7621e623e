"""The region's HTTP face, for its edges and its operator.

Behind the region's secret: generate, cancel, the status stream. Open: health, readiness, status as
JSON, metrics. A client that closes its connection cancels its handler (the runner is built with
`handler_cancellation`), and with it the request.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable

import msgspec
from aiohttp import web

from core.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidRequest,
    RequestError,
    VersionSkew,
    to_fault,
)  # fmt: skip
from core.events import encode_frame
from core.headers import SECRET_HEADER, WIRE_HEADER
from core.metrics import CONTENT_TYPE
from core.status import as_json
from core.types import WIRE_VERSION, GenerateRequest, RequestId
from regional.router import Router
from regional.status import PrefixesSeen, Publisher

log = logging.getLogger("skerry.http")
request_log = logging.getLogger("skerry.request")

FRAMES = "application/x-skerry-frames"
BODY_SLACK = 64 << 10
"""A request's own fields beside the text that the edge has measured."""


_decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode


class RegionHttp:
    """Handlers over one router. `ready` says whether every model can be answered."""

    def __init__(
        self,
        router: Router,
        publisher: Publisher,
        *,
        secret: bytes,
        body_bytes: int,
        ready: Callable[[], bool],
        metrics: Callable[[], bytes],
    ) -> None:
        self._router = router
        self._publisher = publisher
        self._secret = secret
        self._body_bytes = body_bytes
        self._ready = ready
        self._metrics = metrics

    def application(self, more: Iterable[web.RouteDef] = ()) -> web.Application:
        """`more`: routes of others; they ask `check_secret` themselves."""
        app = web.Application(client_max_size=self._body_bytes + BODY_SLACK)
        app.add_routes(
            [
                web.post("/internal/v1/generate", self._generate),
                web.post("/internal/v1/cancel/{request_id}", self._cancel),
                web.get("/internal/v1/status", self._status_stream),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics_page),
                *more,
            ]
        )
        return app

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        self.check_secret(http)
        parsed = await self._parsed(http)
        answer = _frames()
        try:
            await answer.prepare(http)
            if isinstance(parsed, RequestError):
                request_log.info("passed id=- outcome=%s", parsed.code)
                await answer.write(encode_frame(to_fault(parsed)))
            else:
                await self._router.serve(parsed, answer.write)
            await answer.write_eof()
        except ConnectionError:
            log.info("an edge went away in the middle of its answer")
        return answer

    async def _parsed(self, http: web.Request) -> GenerateRequest | RequestError:
        wire = http.headers.get(WIRE_HEADER)
        if wire != str(WIRE_VERSION):
            return VersionSkew(f"the edge speaks wire {wire}, this router {WIRE_VERSION}")
        try:
            return _decode_request(await http.read())
        except web.HTTPRequestEntityTooLarge:
            return BodyTooLarge(f"the request is over {self._body_bytes} bytes")
        except msgspec.MsgspecError as error:
            return InvalidRequest(f"the body is no GenerateRequest: {error}")

    async def _cancel(self, http: web.Request) -> web.Response:
        self.check_secret(http)
        self._router.cancel(RequestId(http.match_info["request_id"]))
        return web.Response(status=204)

    async def _status_stream(self, http: web.Request) -> web.StreamResponse:
        self.check_secret(http)
        answer = _frames()
        seen, told = 0, PrefixesSeen()
        try:
            await answer.prepare(http)
            while True:
                seen, frame = await self._publisher.next_frame(seen)
                told, prefixes = self._publisher.prefix_frame(told)
                await answer.write(frame + prefixes)
        except ConnectionError:
            return answer

    async def _healthz(self, _http: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _readyz(self, _http: web.Request) -> web.Response:
        if self._router.draining:
            return web.json_response({"status": "draining"}, status=503)
        ready = self._ready()
        text = "ready" if ready else "waiting for nodes"
        return web.json_response({"status": text}, status=200 if ready else 503)

    async def _status(self, _http: web.Request) -> web.Response:
        body = as_json(self._publisher.snapshot())
        return web.Response(body=body, content_type="application/json")

    async def _metrics_page(self, _http: web.Request) -> web.Response:
        return web.Response(body=self._metrics(), headers={"content-type": CONTENT_TYPE})

    def check_secret(self, http: web.Request) -> None:
        """Raises HTTPForbidden."""
        given = http.headers.get(SECRET_HEADER, "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, self._secret):
            error = Forbidden("the region's secret does not match")
            body = msgspec.json.encode({"error": {"code": error.code, "message": error.message}})
            raise web.HTTPForbidden(text=body.decode(), content_type="application/json")


def _frames() -> web.StreamResponse:
    headers = {"content-type": FRAMES, WIRE_HEADER: str(WIRE_VERSION)}
    return web.StreamResponse(headers=headers)
