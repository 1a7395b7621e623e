"""Events written in Workers AI's native form: pieces of text, whole tool calls, one result.

A call is shown when it is complete, since its arguments are an object here; one that the token
limit cut is left out, and `finish_reason` says why.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from core.errors import JsonModeUnmet
from core.events import Delta, Finish, ToolCallDelta
from core.types import FinishReason, Usage
from edge.api.openai_render import Shown, join_calls, usage_out
from edge.api.workers_ai_errors import enveloped
from edge.api.workers_ai_types import NativeCallOut, RunChunk, RunResult

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class RunRenderer:
    """The one choice of a native request. `json_mode`: the answer is JSON, not text."""

    def __init__(self, *, json_mode: bool) -> None:
        self._json_mode = json_mode
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, ToolCallDelta] = {}
        self._reason: FinishReason | None = None

    def stream(self, events: Iterable[Shown]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            self._note(event)
            if isinstance(event, Delta):
                if event.reasoning:
                    parts.append(_event(RunChunk(reasoning_content=event.reasoning)))
                if event.text:
                    parts.append(_event(RunChunk(response=event.text)))
            elif isinstance(event, Finish):
                if calls := self._whole_calls():
                    parts.append(_event(RunChunk(tool_calls=calls)))
            else:
                last = RunChunk(finish_reason=self._ended(), usage=usage_out(event.usage))
                parts.append(_event(last))
        return b"".join(parts)

    def take(self, events: Iterable[Shown]) -> None:
        for event in events:
            self._note(event)
            if isinstance(event, Delta):
                self._texts.append(event.text)
                self._reasoning.append(event.reasoning)

    def whole(self, usage: Usage) -> bytes:
        """Raises JsonModeUnmet."""
        return enveloped(self.result(usage))

    def result(self, usage: Usage) -> RunResult:
        """Raises JsonModeUnmet."""
        calls, text = self._whole_calls(), "".join(self._texts)
        reasoning = "".join(self._reasoning)
        response: object = text
        if self._json_mode and not calls:
            value = _json(text)
            if value is None:
                raise JsonModeUnmet(
                    f"JSON Mode couldn't be met: the answer ended ({self._ended()}) after"
                    f" {usage.completion_tokens} tokens, before its JSON did"
                )
            response = value
        return RunResult(
            response=response,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
            finish_reason=self._ended(),
            usage=usage_out(usage),
        )

    def _note(self, event: Shown) -> None:
        if isinstance(event, Delta):
            join_calls(self._calls, event.tool_calls)
        elif isinstance(event, Finish):
            self._reason = event.reason

    def _ended(self) -> FinishReason:
        assert self._reason is not None, "the gateway lets no Done pass without every Finish"
        return self._reason

    def _whole_calls(self) -> list[NativeCallOut]:
        cut = self._reason is FinishReason.LENGTH
        outs = (_call(call, cut=cut) for _, call in sorted(self._calls.items()))
        return [out for out in outs if out is not None]


def _call(call: ToolCallDelta, *, cut: bool) -> NativeCallOut | None:
    """None where its arguments are no whole JSON; none at all are an empty object, unless the
    answer was cut before they came."""
    arguments = _json(call.arguments.strip() or ("" if cut else "{}"))
    if arguments is None:
        return None
    return NativeCallOut(
        index=call.index, id=call.id or "", name=call.name or "", arguments=arguments
    )


def _event(chunk: RunChunk) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def _json(text: str) -> msgspec.Raw | None:
    """On one line, as an event has to be, its order and numbers untouched; None for no JSON."""
    try:
        _decode(text)
        return msgspec.Raw(msgspec.json.format(text, indent=-1).encode())
    except (msgspec.DecodeError, RecursionError):
        return None
