"""Events written in OpenAI's dialect: chunks of a stream, one answer, errors.

A renderer holds the state of one request: whether the role went out, what the answer is so far.
The whole answer is a fold over the same events that a stream shows piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from core.errors import RequestError
from core.events import Delta, Done, Finish
from core.types import FinishReason, Usage
from edge.api.openai_types import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ErrorAnswer,
    ErrorDetail,
    MessageOut,
    PromptTokensDetails,
    TextAnswer,
    TextChoice,
    UsageOut,
)

Shown = Delta | Finish | Done
END = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Renderer(Protocol):
    """One dialect's form of one request."""

    def stream(self, events: Iterable[Shown]) -> bytes:
        """Server-sent events, complete ones; b"" when the events show nothing."""
        ...

    def take(self, events: Iterable[Shown]) -> None:
        """Add to the answer that is sent whole."""
        ...

    def whole(self, usage: Usage) -> bytes:
        """The answer of everything taken; a `Finish` must have been among it."""
        ...


class _Renderer:
    """What chat and legacy completions share."""

    _prefix: str

    def __init__(self, *, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._id = f"{self._prefix}-{request_id}"
        self._model = model
        self._created = created
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._texts: list[str] = []
        self._reason: FinishReason | None = None

    def take(self, events: Iterable[Shown]) -> None:
        for event in events:
            if isinstance(event, Delta):
                self._texts.append(event.text)
            elif isinstance(event, Finish):
                self._reason = event.reason


class ChatRenderer(_Renderer):
    _prefix = "chatcmpl"

    def __init__(self, *, request_id: str, model: str, created: int, include_usage: bool) -> None:
        super().__init__(
            request_id=request_id, model=model, created=created, include_usage=include_usage
        )
        self._role_sent = False

    def stream(self, events: Iterable[Shown]) -> bytes:
        parts: list[bytes] = []
        if not self._role_sent:
            self._role_sent = True
            parts.append(self._chunk(ChatDelta(role="assistant", content="")))
        for event in events:
            if isinstance(event, Delta):
                if event.text:
                    parts.append(self._chunk(ChatDelta(content=event.text), index=event.choice))
            elif isinstance(event, Finish):
                parts.append(self._chunk(ChatDelta(), event.reason, event.choice))
            elif self._include_usage:
                last = ChatChunk(
                    id=self._id,
                    created=self._created,
                    model=self._model,
                    choices=[],
                    usage=_usage(event.usage),
                )
                parts.append(_event(last))
        return b"".join(parts)

    def whole(self, usage: Usage) -> bytes:
        assert self._reason is not None, "the gateway lets no Done pass without a Finish"
        choice = ChatChoice(
            index=0,
            message=MessageOut(content="".join(self._texts)),
            finish_reason=self._reason,
        )
        return _encode(
            ChatAnswer(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=_usage(usage),
            )
        )

    def _chunk(self, delta: ChatDelta, reason: FinishReason | None = None, index: int = 0) -> bytes:
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=reason)
        return _event(
            ChatChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[choice],
                usage=self._no_usage,
            )
        )


class TextRenderer(_Renderer):
    _prefix = "cmpl"

    def stream(self, events: Iterable[Shown]) -> bytes:
        parts: list[bytes] = []
        last: Delta | None = None  # told with the reason when its choice ends in the same step
        for event in events:
            if last is not None and not _ends(event, last):
                parts.append(self._piece(last.choice, last.text, None))
                last = None
            if isinstance(event, Delta):
                last = event if event.text else None
            elif isinstance(event, Finish):
                parts.append(self._piece(event.choice, last.text if last else "", event.reason))
                last = None
            elif self._include_usage:
                parts.append(_event(self._answer([], _usage(event.usage))))
        if last is not None:
            parts.append(self._piece(last.choice, last.text, None))
        return b"".join(parts)

    def _piece(self, index: int, text: str, reason: FinishReason | None) -> bytes:
        choice = TextChoice(index=index, text=text, finish_reason=reason)
        return _event(self._answer([choice], self._no_usage))

    def whole(self, usage: Usage) -> bytes:
        choice = TextChoice(index=0, text="".join(self._texts), finish_reason=self._reason)
        return _encode(self._answer([choice], _usage(usage)))

    def _answer(self, choices: list[TextChoice], usage: UsageOut | UnsetType | None) -> TextAnswer:
        return TextAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


def _ends(event: Shown, delta: Delta) -> bool:
    return isinstance(event, Finish) and event.choice == delta.choice


def error_body(error: RequestError) -> bytes:
    """OpenAI's error form."""
    kind = _TYPES.get(error.http_status)
    if kind is None:
        kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    detail = ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code)
    return _encode(ErrorAnswer(detail))


def error_event(error: RequestError) -> bytes:
    """The same inside a stream that has begun; nothing follows it, not even [DONE]."""
    return b"data: " + error_body(error) + b"\n\n"


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def _usage(usage: Usage) -> UsageOut:
    return UsageOut(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
