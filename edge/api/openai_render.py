"""Events written in OpenAI's dialect: chunks of a stream, one answer, errors.

A renderer holds the state of one request: whether the role went out, what the answer is so far.
The whole answer is a fold over the same events that a stream shows piece by piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from core.errors import RequestError
from core.events import Delta, Done, Finish, TokenLogprob, ToolCallDelta
from core.types import FinishReason, Usage
from edge.api.logprobs import TextOffsets, chat_logprobs, text_logprobs
from edge.api.openai_types import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ErrorAnswer,
    ErrorDetail,
    FunctionOut,
    FunctionPiece,
    MessageOut,
    PromptTokensDetails,
    TextAnswer,
    TextChoice,
    ToolCallOut,
    ToolCallPiece,
    UsageOut,
)

Shown = Delta | Finish | Done
END = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_MARK = "the text"
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


@dataclass(slots=True)
class _Choice:
    """One choice as far as it has come."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    reason: FinishReason | None = None
    offsets: TextOffsets = field(default_factory=TextOffsets)
    around: tuple[bytes, bytes] | None = None


class _Renderer:
    """What chat and legacy completions share. `logprobs`: the caller asked for them."""

    _prefix: str

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        include_usage: bool,
        logprobs: bool = False,
    ) -> None:
        self._id = f"{self._prefix}-{request_id}"
        self._model = model
        self._created = created
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._logprobs = logprobs
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    def take(self, events: Iterable[Shown]) -> None:
        for event in events:
            if isinstance(event, Delta):
                choice = self._choices[event.choice]
                choice.texts.append(event.text)
                choice.logprobs.extend(event.logprobs)
                join_calls(choice.calls, event.tool_calls)
            elif isinstance(event, Finish):
                self._choices[event.choice].reason = event.reason


class ChatRenderer(_Renderer):
    _prefix = "chatcmpl"

    def stream(self, events: Iterable[Shown]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            if not isinstance(event, Done) and event.choice not in self._choices:
                self._choices[event.choice] = _Choice()
                parts.append(self._chunk(event.choice, ChatDelta(role="assistant", content="")))
            if isinstance(event, Delta):
                if event.text and not (event.logprobs or event.tool_calls):
                    before, after = self._around(event.choice)
                    parts += (before, _encode(event.text), after)
                elif event.text or event.logprobs or event.tool_calls:
                    delta = ChatDelta(
                        content=UNSET if event.tool_calls and not event.text else event.text,
                        tool_calls=[*map(_call_piece, event.tool_calls)] or UNSET,
                    )
                    parts.append(self._chunk(event.choice, delta, logprobs=event.logprobs))
            elif isinstance(event, Finish):
                parts.append(self._chunk(event.choice, ChatDelta(), event.reason))
            elif self._include_usage:
                last = ChatChunk(
                    id=self._id,
                    created=self._created,
                    model=self._model,
                    choices=[],
                    usage=usage_out(event.usage),
                )
                parts.append(_event(last))
        return b"".join(parts)

    def _around(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a plain chunk: the same for all of a choice,
        and most of what a stream is."""
        choice = self._choices[index]
        if choice.around is None:
            sample = self._chunk(index, ChatDelta(content=_MARK))
            before, _, after = sample.rpartition(_encode(_MARK))
            choice.around = before, after
        return choice.around

    def whole(self, usage: Usage) -> bytes:
        return _encode(
            ChatAnswer(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._whole(index, one) for index, one in sorted(self._choices.items())],
                usage=usage_out(usage),
            )
        )

    def _whole(self, index: int, one: _Choice) -> ChatChoice:
        assert one.reason is not None, "the gateway lets no Done pass without every Finish"
        return ChatChoice(
            index=index,
            message=MessageOut(
                content="".join(one.texts) or (None if one.calls else ""),
                tool_calls=[_call(call) for _, call in sorted(one.calls.items())] or UNSET,
            ),
            logprobs=chat_logprobs(one.logprobs) if self._logprobs else None,
            finish_reason=one.reason,
        )

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        reason: FinishReason | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=chat_logprobs(logprobs) if logprobs else None,
            finish_reason=reason,
        )
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
                parts.append(self._piece(last.choice, last, None))
                last = None
            if isinstance(event, Delta):
                last = event if event.text or event.logprobs else None
            elif isinstance(event, Finish):
                parts.append(self._piece(event.choice, last, event.reason))
                last = None
            elif self._include_usage:
                parts.append(_event(self._answer([], usage_out(event.usage))))
        if last is not None:
            parts.append(self._piece(last.choice, last, None))
        return b"".join(parts)

    def _piece(self, index: int, delta: Delta | None, reason: FinishReason | None) -> bytes:
        text, logprobs = (delta.text, delta.logprobs) if delta else ("", ())
        choice = TextChoice(
            index=index,
            text=text,
            logprobs=text_logprobs(logprobs, self._choices[index].offsets) if logprobs else None,
            finish_reason=reason,
        )
        return _event(self._answer([choice], self._no_usage))

    def whole(self, usage: Usage) -> bytes:
        choices = [self._whole(index, one) for index, one in sorted(self._choices.items())]
        return _encode(self._answer(choices, usage_out(usage)))

    def _whole(self, index: int, one: _Choice) -> TextChoice:
        return TextChoice(
            index=index,
            text="".join(one.texts),
            logprobs=text_logprobs(one.logprobs, one.offsets) if self._logprobs else None,
            finish_reason=one.reason,
        )

    def _answer(self, choices: list[TextChoice], usage: UsageOut | UnsetType | None) -> TextAnswer:
        return TextAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


def join_calls(calls: dict[int, ToolCallDelta], pieces: Iterable[ToolCallDelta]) -> None:
    """Add pieces of calls to the calls so far, by index."""
    for piece in pieces:
        known = calls.get(piece.index)
        if known is None:
            calls[piece.index] = piece
        else:
            calls[piece.index] = msgspec.structs.replace(
                known, arguments=known.arguments + piece.arguments
            )


def _call(call: ToolCallDelta) -> ToolCallOut:
    return ToolCallOut(
        id=call.id or "", function=FunctionOut(name=call.name or "", arguments=call.arguments)
    )


def _call_piece(piece: ToolCallDelta) -> ToolCallPiece:
    return ToolCallPiece(
        index=piece.index,
        id=UNSET if piece.id is None else piece.id,
        type=UNSET if piece.id is None else "function",
        function=FunctionPiece(
            name=UNSET if piece.name is None else piece.name, arguments=piece.arguments
        ),
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


def usage_out(usage: Usage) -> UsageOut:
    return UsageOut(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )
