"""Every route of an edge, and the form of refusals outside a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import HttpMethod, Request, Response, get, post, route
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, ExceptionHandlersMap

from core import metrics
from core.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RequestError,
)
from edge.api.error_form import ErrorForm, OpenAIErrors
from edge.api.exchange import Desk, Dialect, Exchange, refusal_headers
from edge.api.openai import Intake, Parsed
from edge.api.openai_render import ChatRenderer, Renderer, TextRenderer
from edge.api.status_page import Outlook
from edge.api.workers_ai_errors import CLOUDFLARE, CloudflareErrors
from edge.crew.chorus import Chorus
from edge.tenants.door import Door

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used
_JSON = "application/json"
_TEXT = "text/plain"  # the framework names the charset
_LOOK = [HttpMethod.GET, HttpMethod.HEAD]
"""Of pages that a monitor asks for."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What the pages show. `openapi` is the finished document."""

    outlook: Outlook
    door: Door
    chorus: Chorus
    openapi: bytes
    version: str

    def handlers(self) -> list[HTTPRouteHandler]:
        """The routes that answer from what the edge knows."""

        @route("/healthz", http_method=_LOOK)
        async def healthz() -> Response[bytes]:
            return Response(b"ok\n", media_type=_TEXT)

        @route("/readyz", http_method=_LOOK)
        async def readyz() -> Response[bytes]:
            if self.outlook.ready():
                return Response(b"ready\n", media_type=_TEXT)
            why = self.outlook.unready
            return Response(f"{why}\n".encode(), media_type=_TEXT, status_code=503)

        @get("/status")
        async def status() -> Response[bytes]:
            workers = await self.chorus.workers()
            return _json(
                self.outlook.status(
                    version=self.version, uptime_s=self.chorus.uptime_s, workers=workers
                )
            )

        @get("/metrics")
        async def scrape() -> Response[bytes]:
            return Response(await self.chorus.metrics(), media_type=metrics.CONTENT_TYPE)

        @get("/openapi.json")
        async def openapi() -> Response[bytes]:
            return Response(self.openapi, media_type=_JSON)

        @get("/v1/models")
        async def models(request: _Request) -> Response[bytes]:
            caller = self.door.authenticate(dict(request.scope["headers"]))
            return _json(self.outlook.models(caller))

        @get("/v1/models/{model:path}")
        async def model(request: _Request) -> Response[bytes]:
            caller = self.door.authenticate(dict(request.scope["headers"]))
            name = str(request.path_params["model"]).removeprefix("/")
            return _json(self.outlook.model(name, caller))

        return [healthz, readyz, status, scrape, openapi, models, model]


def generation_handlers(desk: Desk, intake: Intake) -> list[HTTPRouteHandler]:
    """The routes that generate, in OpenAI's dialect."""
    chat = Dialect("chat", intake.chat, chat_renderer, OpenAIErrors())
    text = Dialect("completions", intake.completion, text_renderer, OpenAIErrors())

    @post("/v1/chat/completions")
    async def chat_completions() -> ASGIApp:
        return Exchange(desk, chat)

    @post("/v1/completions")
    async def completions() -> ASGIApp:
        return Exchange(desk, text)

    return [chat_completions, completions]


def exception_handlers() -> ExceptionHandlersMap:
    """Ours and the framework's errors, both in the form of the API that was asked."""
    return {RequestError: _refuse, HTTPException: _refuse_http}


def _refuse(request: _Request, error: RequestError) -> Response[bytes]:
    form = _form(request.scope["path"])
    headers = {name.decode(): value.decode() for name, value in refusal_headers(error)}
    return Response(
        form.body(error), media_type=_JSON, status_code=form.status(error), headers=headers
    )


def _form(path: str) -> ErrorForm:
    return CloudflareErrors() if path.startswith(CLOUDFLARE) else OpenAIErrors()


def _refuse_http(request: _Request, error: HTTPException) -> Response[bytes]:
    where = f"{request.method} {request.scope['path'][:200]}"
    ours: RequestError
    if error.status_code == 404:
        ours = NotFound(f"Unknown request URL: {where}.")
    elif error.status_code == 405:
        ours = MethodNotAllowed(f"Method not allowed: {where}.")
    elif error.status_code < 500:
        ours = InvalidRequest(error.detail)
    else:
        ours = InternalError("the edge failed")
    answer = _refuse(request, ours)
    answer.headers |= {k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"}
    return answer


def _json(page: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(page), media_type=_JSON)


def chat_renderer(parsed: Parsed) -> Renderer:
    return ChatRenderer(
        request_id=parsed.request.id,
        model=parsed.asked_model,
        created=parsed.request.rendered_at,
        include_usage=parsed.include_usage,
        logprobs=parsed.request.sampling.logprobs is not None,
    )


def text_renderer(parsed: Parsed) -> Renderer:
    return TextRenderer(
        request_id=parsed.request.id,
        model=parsed.asked_model,
        created=parsed.request.rendered_at,
        include_usage=parsed.include_usage,
        logprobs=parsed.request.sampling.logprobs is not None,
    )
