"""Cloudflare's routes in the OpenAPI document, made from the structs that parse and render."""

from __future__ import annotations

from typing import Any

import msgspec

from edge.api.openai_types import ChatAnswer, ChatChunk, ErrorAnswer, TextAnswer
from edge.api.workers_ai_errors import STATUSES, Envelope
from edge.api.workers_ai_models import FILTERS, FoundModels
from edge.api.workers_ai_types import (
    BatchOut,
    PollBody,
    QueuedBody,
    QueuedOut,
    RunBody,
    RunChunk,
    RunResult,
    SubmitBody,
    TwinChatBody,
    TwinTextBody,
)

_KINDS = (
    RunBody, SubmitBody, QueuedBody, PollBody, TwinChatBody, TwinTextBody, ChatAnswer, ChatChunk,
    TextAnswer, RunChunk, FoundModels, Envelope[RunResult], Envelope[QueuedOut],
    Envelope[BatchOut], Envelope[None], ErrorAnswer,
)  # fmt: skip
_AI = "/client/v4/accounts/{account}/ai"
_JSON, _EVENTS = "application/json", "text/event-stream"
_OURS = {400, 401, 403, 404, 405, 408, 413, 415, 429, 500}
"""Statuses of refusals on the native routes: capacity is 429 there, never 5xx."""


def workers_ai_paths() -> tuple[dict[str, Any], dict[str, Any]]:
    """Paths, and the schemas that they refer to."""
    found, schemas = msgspec.json.schema_components(
        _KINDS, ref_template="#/components/schemas/{name}"
    )
    refs: dict[object, dict[str, Any]] = dict(zip(_KINDS, found, strict=True))

    def one_of(*kinds: object) -> dict[str, Any]:
        some = [refs[kind] for kind in kinds]
        return some[0] if len(some) == 1 else {"anyOf": some}

    def content(media: str, *kinds: object) -> dict[str, Any]:
        return {media: {"schema": one_of(*kinds)}}

    def refusals(statuses: set[int], kind: object) -> dict[str, Any]:
        return {
            str(status): {"description": "Refused.", "content": content(_JSON, kind)}
            for status in sorted(statuses)
        }

    def twin(body: object, answer: object, chunk: object) -> dict[str, Any]:
        whole = {**content(_JSON, answer), **content(_EVENTS, chunk)}
        return _post(
            [],
            content(_JSON, body),
            {
                "200": {"description": "As OpenAI's route of that name.", "content": whole},
                **refusals(
                    {400, 401, 403, 404, 408, 413, 415, 429, 500, 502, 503, 504}, ErrorAnswer
                ),
            },
        )

    native = {
        **content(_JSON, Envelope[RunResult], Envelope[QueuedOut], Envelope[BatchOut]),
        **content(_EVENTS, RunChunk),
    }
    run = _post(
        [_named("model", "path", required=True), _QUEUE],
        content(_JSON, RunBody, SubmitBody, QueuedBody, PollBody),
        {
            "200": {"description": "A result, a batch, or events.", "content": native},
            **refusals(_OURS | set(STATUSES.values()), Envelope[None]),
        },
    )
    search = {
        "parameters": [_ACCOUNT, *(_named(name, "query") for name in FILTERS)],
        "responses": {
            "200": {"description": "The models.", "content": content(_JSON, FoundModels)},
            **refusals({400, 401, 403}, Envelope[None]),
        },
    }
    paths = {
        f"{_AI}/run/{{model}}": run,
        f"{_AI}/v1/chat/completions": twin(TwinChatBody, ChatAnswer, ChatChunk),
        f"{_AI}/v1/completions": twin(TwinTextBody, TextAnswer, TextAnswer),
        f"{_AI}/models/search": {"get": search},
    }
    return paths, schemas


def _named(name: str, where: str, *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": {"type": "string"}}


_ACCOUNT = _named("account", "path", required=True)
_AFFINITY = _named("x-session-affinity", "header")
_QUEUE = {
    **_named("queueRequest", "query"),
    "schema": {"type": "string", "enum": ["true", "false"]},
    "description": "true: `requests` are queued, `request_id` asks how far they are.",
}


def _post(
    parameters: list[dict[str, Any]], body: dict[str, Any], responses: dict[str, Any]
) -> dict[str, Any]:
    return {
        "post": {
            "parameters": [_ACCOUNT, *parameters, _AFFINITY],
            "requestBody": {"required": True, "content": body},
            "responses": responses,
        }
    }
