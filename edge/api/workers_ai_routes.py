"""Cloudflare's routes: `…/ai/run/{model}`, `…/ai/v1/…`, `…/ai/models/search`.

The account in the path is the caller's own word; who is asking is said by the key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from core.errors import InvalidRequest, UnsupportedField
from core.types import RequestId
from edge.api.error_form import OpenAIErrors
from edge.api.exchange import Desk, Dialect, Exchange
from edge.api.openai import Parsed
from edge.api.openai_render import Renderer
from edge.api.pages import chat_renderer, text_renderer
from edge.api.status_page import Outlook
from edge.api.workers_ai import RunIntake, check_headers
from edge.api.workers_ai_batch import BatchDesk, BatchExchange
from edge.api.workers_ai_errors import CloudflareErrors
from edge.api.workers_ai_models import search
from edge.api.workers_ai_render import RunRenderer

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used
_AI = "/client/v4/accounts/{account:str}/ai"
_QUEUED = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class _Run:
    """The parser of one request to `/ai/run/{model}`; path and headers are a part of it."""

    intake: RunIntake
    model: str
    headers: Mapping[bytes, bytes]

    def __call__(self, raw: bytes, request_id: RequestId) -> Parsed:
        check_headers(self.headers)
        return self.intake.run(self.model, raw, request_id)


def workers_ai_handlers(
    desk: Desk, intake: RunIntake, outlook: Outlook, batches: BatchDesk
) -> list[HTTPRouteHandler]:
    errors = CloudflareErrors()
    twin_chat = Dialect("cf_chat", intake.chat, chat_renderer, OpenAIErrors())
    twin_text = Dialect("cf_completions", intake.completion, text_renderer, OpenAIErrors())

    @post(_AI + "/run/{model:path}")
    async def run(request: _Request) -> ASGIApp:
        model = str(request.path_params["model"]).removeprefix("/")
        if _to_queue(request):
            return BatchExchange(batches, model)
        headers = dict(request.scope["headers"])
        return Exchange(desk, Dialect("run", _Run(intake, model, headers), _renderer, errors))

    @post(_AI + "/v1/chat/completions")
    async def chat_completions() -> ASGIApp:
        return Exchange(desk, twin_chat)

    @post(_AI + "/v1/completions")
    async def completions() -> ASGIApp:
        return Exchange(desk, twin_text)

    @get(_AI + "/models/search")
    async def models(request: _Request) -> Response[bytes]:
        caller = desk.door.authenticate(dict(request.scope["headers"]))
        found = search(outlook.models(caller).data, dict(request.query_params))
        return Response(msgspec.json.encode(found), media_type="application/json")

    return [run, chat_completions, completions, models]


def _to_queue(request: _Request) -> bool:
    """Raises UnsupportedField, InvalidRequest."""
    query = dict(request.query_params)
    asked = str(query.pop("queueRequest", "false")).lower()
    if query:
        name = next(iter(query))[:80]
        raise UnsupportedField(f"the query parameter {name!r} is not supported.", param=name)
    if asked not in _QUEUED:
        raise InvalidRequest("'queueRequest' is true or false.", param="queueRequest")
    return _QUEUED[asked]


def _renderer(parsed: Parsed) -> Renderer:
    return RunRenderer(json_mode=parsed.request.response_format is not None)
