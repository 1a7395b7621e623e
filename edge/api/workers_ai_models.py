"""`GET …/ai/models/search`: the models of this world in Cloudflare's form, and its filters."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from core.errors import InvalidRequest, UnsupportedField
from core.nearest import did_you_mean
from edge.api.openai_types import ModelOut
from edge.api.workers_ai_errors import ErrorOut
from edge.api.workers_ai_types import FoundModel, PropertyOut, TaskOut

PER_PAGE = 50
MAX_PER_PAGE = 1000
_SOURCE = 1
"""Cloudflare's number for models that it hosts itself; ours are of no other kind."""
_TASK = TaskOut(
    id=str(uuid.uuid5(uuid.NAMESPACE_URL, "skerry/task/text-generation")),
    name="Text Generation",
    description="Models that go on with a text or answer in a conversation.",
)
FILTERS = ("author", "hide_experimental", "page", "per_page", "search", "source", "task")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class PageInfo(msgspec.Struct, frozen=True, kw_only=True):
    page: int
    per_page: int
    count: int
    total_count: int


class FoundModels(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of a list."""

    result: list[FoundModel]
    success: bool = True
    errors: list[ErrorOut] = msgspec.field(default_factory=list)
    messages: list[str] = msgspec.field(default_factory=list)
    result_info: PageInfo


def search(models: list[ModelOut], query: Mapping[str, str]) -> FoundModels:
    """Raises InvalidRequest for a filter that does not fit, UnsupportedField for another one."""
    for name in query:
        if name not in FILTERS:
            hint = did_you_mean(name[:80], FILTERS, f"there are: {', '.join(FILTERS)}")
            raise UnsupportedField(f"{name[:80]!r} is no filter; {hint}", param=name[:80])
    page, per_page = _number(query, "page", 1), _number(query, "per_page", PER_PAGE)
    if per_page > MAX_PER_PAGE:
        raise InvalidRequest(f"'per_page' is over {MAX_PER_PAGE}.", param="per_page")
    if query.get("hide_experimental", "false").lower() not in _BOOLEANS:
        raise InvalidRequest("'hide_experimental' is true or false.", param="hide_experimental")
    source = _number(query, "source", _SOURCE)
    task = query.get("task", "").casefold()
    found: list[FoundModel] = []
    if source == _SOURCE and task in ("", _TASK.name.casefold()):
        found = [_shown(model, name) for model in models for name in _names(model)]
    author, text = query.get("author", "").casefold(), query.get("search", "").casefold()
    found = [
        one
        for one in found
        if text in one.name.casefold() and author in ("", _author(one.name).casefold())
    ]
    part = found[(page - 1) * per_page : page * per_page]
    info = PageInfo(page=page, per_page=per_page, count=len(part), total_count=len(found))
    return FoundModels(result=part, result_info=info)


def _names(model: ModelOut) -> list[str]:
    """The names in Cloudflare's form; a model without one goes by its own."""
    return [alias for alias in model.aliases if alias.startswith("@")] or [model.id]


def _author(name: str) -> str:
    parts = name.split("/")
    return parts[1] if name.startswith("@") and len(parts) > 2 else ""


def _shown(model: ModelOut, name: str) -> FoundModel:
    properties = [PropertyOut(property_id="async_queue", value="true")]
    if model.context_length is not None:
        value = str(model.context_length)
        properties.append(PropertyOut(property_id="context_window", value=value))
    return FoundModel(
        id=str(uuid.uuid5(uuid.NAMESPACE_URL, f"skerry/model/{name}")),
        source=_SOURCE,
        name=name,
        description=f"{model.id}, served by this world.",
        task=_TASK,
        created_at=f"{datetime.fromtimestamp(model.created, UTC):%Y-%m-%d %H:%M:%S.000}",
        tags=[],
        properties=properties,
    )


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and int(text) >= 1):
        raise InvalidRequest(f"{name!r} is a whole number from 1.", param=name)
    return int(text)
