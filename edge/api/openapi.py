"""`GET /openapi.json`: the document, made from the structs that parse and render.

There is no second description to fall out of step: what msgspec refuses is what the schema says.
"""

from __future__ import annotations

from typing import Any

import msgspec

from edge.api.openai_types import (
    ChatAnswer,
    ChatBody,
    ChatChunk,
    CompletionBody,
    ErrorAnswer,
    ModelList,
    ModelOut,
    TextAnswer,
)
from edge.api.status_page import FrontPage, StatusPage
from edge.api.workers_ai_openapi import workers_ai_paths

_BODIES = (ChatBody, CompletionBody)
_ANSWERS = (
    ChatAnswer, ChatChunk, TextAnswer, ErrorAnswer, ModelList, ModelOut, FrontPage, StatusPage,
)  # fmt: skip
_NO_KEY = "No key, or one that is not valid."
_REFUSALS = {
    "400": "The request does not fit; `param` names the field.",
    "401": _NO_KEY,
    "403": "The key may not use this model.",
    "404": "No such model or route.",
    "408": "The body came too slowly.",
    "413": "The body is over the limit.",
    "415": "The body's encoding is not known.",
    "429": "A limit of the tenant's is used, or there is no capacity now; see Retry-After.",
    "500": "A mistake of ours.",
    "502": "The region's stream broke.",
    "503": "No region can answer now.",
    "504": "The deadline passed.",
}


def document(version: str) -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    _, schemas = msgspec.json.schema_components(
        [*_BODIES, *_ANSWERS], ref_template="#/components/schemas/{name}"
    )
    paths, more = workers_ai_paths()
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Skerry edge", "version": version},
            "paths": {
                "/": _page("Where things are.", FrontPage),
                "/v1/chat/completions": _generation(ChatBody, ChatAnswer, ChatChunk),
                "/v1/completions": _generation(CompletionBody, TextAnswer, TextAnswer),
                "/v1/models": _page("The models of this world.", ModelList, keyed=True),
                "/v1/models/{model}": _page(
                    "One model, by name or alias.", ModelOut, "model", keyed=True
                ),
                "/status": _page("The edge and what it knows of its regions.", StatusPage),
                "/healthz": _text("200 while the process serves."),
                "/readyz": _text(
                    "At least one region can answer.", busy="None can now, or the edge is drained."
                ),
                "/metrics": _text("Prometheus text format."),
                **paths,
            },
            "security": [{}, {"key": []}],
            "components": {
                "schemas": {**schemas, **more},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _json(kind: type[msgspec.Struct], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(kind)}}}


def _generation(
    body: type[msgspec.Struct], answer: type[msgspec.Struct], chunk: type[msgspec.Struct]
) -> dict[str, Any]:
    success: dict[str, Any] = {
        "description": "The answer; with `stream` true, events of chunks that end in [DONE].",
        "content": {
            "application/json": {"schema": _ref(answer)},
            "text/event-stream": {"schema": _ref(chunk)},
        },
    }
    refusals = {status: _json(ErrorAnswer, why) for status, why in _REFUSALS.items()}
    return {
        "post": {
            "parameters": [
                {
                    "name": "x-session-affinity",
                    "in": "header",
                    "required": False,
                    "schema": {"type": "string"},
                    "description": "Requests that share it go to one region.",
                }
            ],
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(body)}},
            },
            "responses": {"200": success, **refusals},
        }
    }


def _page(
    description: str, kind: type[msgspec.Struct], path: str = "", *, keyed: bool = False
) -> dict[str, Any]:
    operation: dict[str, Any] = {"responses": {"200": _json(kind, description)}}
    if keyed:
        operation["responses"]["401"] = _json(ErrorAnswer, _NO_KEY)
    if path:
        operation["responses"]["404"] = _json(ErrorAnswer, "No such model.")
        operation["parameters"] = [
            {"name": path, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return {"get": operation}


def _text(description: str, *, busy: str = "") -> dict[str, Any]:
    """`busy`: what a 503 says, where there may be one."""
    content = {"text/plain": {"schema": {"type": "string"}}}
    responses = {"200": {"description": description, "content": content}}
    if busy:
        responses["503"] = {"description": busy, "content": content}
    return {"get": {"responses": responses}}
