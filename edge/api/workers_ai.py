"""Workers AI's requests, parsed once: each becomes OpenAI's body, and that a `Parsed`.

What the two APIs share is so refused in one way. A field is honoured, or refused by name unless it
holds its neutral value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from core.errors import (
    IncompleteRequest,
    InvalidModelName,
    InvalidRequest,
    LoraUnsupported,
    UnsupportedField,
)
from core.types import GenerateRequest, RequestId, Sampling
from edge.api.body import decode
from edge.api.openai import Intake, Parsed
from edge.api.openai_types import ChatBody, CompletionBody, Function, MessageIn, ToolCallIn
from edge.api.workers_ai_types import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TEMPERATURE,
    NativeCall,
    Options,
    QueuedBody,
    RunBody,
    RunMessage,
    SubmitBody,
    TwinChatBody,
    TwinTextBody,
)

_MODEL_NAME = re.compile(r"[@A-Za-z0-9][\w.@:/+-]{0,199}")
_WRAPPER = {"name", "schema", "strict", "description"}
_SAME = (
    "top_p", "top_k", "seed", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "stop", "logit_bias", "stream", "prompt_cache_key", "user", "metadata",
)  # fmt: skip
"""Fields that OpenAI's bodies have under the same name."""
_CHAT_ONLY = ("tool_choice", "parallel_tool_calls", "reasoning_effort", "prediction")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "functions": ([],),
    "chat_template_kwargs": ({},),
    "stream_options": (),
    "request_id": (),
    "requests": (),
}
"""What a known field of ours may hold besides null."""
_ELSEWHERE = {
    "n": "…/ai/v1/chat/completions has it",
    "logprobs": "…/ai/v1/chat/completions has it",
    "top_logprobs": "…/ai/v1/chat/completions has it",
    "functions": "say 'tools'",
    "stream_options": "usage is always in the last event",
    "request_id": "it needs ?queueRequest=true",
    "requests": "it needs ?queueRequest=true",
    "queueRequest": "say ?queueRequest=true",
    "gateway": "there is no AI Gateway here",
}
_OPTIONS: dict[str, tuple[object, ...]] = {
    "queueRequest": (False,),
    "gateway": (),
    "extraHeaders": ({},),
    "returnRawResponse": (False,),
}
_GATEWAY_HEADER = b"cf-aig-"
_GATEWAY_NEUTRAL = {b"cf-aig-skip-cache": b"true", b"cf-aig-collect-log": b"false"}


@dataclass(frozen=True, slots=True)
class RunIntake:
    """The parsers of Cloudflare's routes, over those of OpenAI's."""

    openai: Intake

    def run(self, model: str, raw: bytes, request_id: RequestId) -> Parsed:
        """A body of `/ai/run/{model}`. Raises InvalidRequest and its kinds, ModelNotFound."""
        self._check(model)
        return self._run(model, decode(RunBody, raw), request_id)

    def queued(self, model: str, raw: bytes, request_id: RequestId) -> list[tuple[Parsed, str]]:
        """The requests of a batch, each with its external reference ("" for none), refused as
        `run` does with the number of the one that does not fit. Request ids count from 0."""
        self._check(model)
        found: list[tuple[Parsed, str]] = []
        for i, one in enumerate(_submitted(raw)):
            at = f"requests[{i}]"
            for field in ("stream", "options"):
                if getattr(one, field):
                    raise UnsupportedField(
                        f"'{at}.{field}' is not for the queue.", param=f"{at}.{field}"
                    )
            try:
                parsed = self._run(model, one, RequestId(f"{request_id}-{i}"))
            except InvalidRequest as error:
                param = f"{at}.{error.param}" if error.param else at
                raise type(error)(f"{at}: {error.message}", param=param) from error
            found.append((parsed, one.external_reference or ""))
        return found

    def _check(self, model: str) -> None:
        """First: inputs that do not fit may be those of another model's task."""
        check_name(model)
        self.openai.model_named(model)

    def chat(self, raw: bytes, request_id: RequestId) -> Parsed:
        """A body of `/ai/v1/chat/completions`."""
        body = decode(TwinChatBody, raw)
        return _with(self.openai.chat_of(body, request_id, DEFAULT_MAX_TOKENS), body.options)

    def completion(self, raw: bytes, request_id: RequestId) -> Parsed:
        """A body of `/ai/v1/completions`."""
        body = decode(TwinTextBody, raw)
        return _with(self.openai.completion_of(body, request_id, DEFAULT_MAX_TOKENS), body.options)

    def _run(self, model: str, body: RunBody, request_id: RequestId) -> Parsed:
        given = [f for f in ("prompt", "messages", "input") if getattr(body, f) is not None]
        if not given:
            raise IncompleteRequest("one of 'prompt', 'messages' and 'input' is required")
        if len(given) > 1:
            first, second, *_ = given
            raise InvalidRequest(f"'{first}' and '{second}' exclude each other", param=second)
        _refuse(body, _NEUTRAL)
        if body.lora:
            raise LoraUnsupported(f"the model {model!r} has no LoRA", param="lora")
        if body.stream and body.response_format is not None:
            raise UnsupportedField(
                "JSON Mode does not support 'stream'; leave one of them out.", param="stream"
            )
        if body.raw and body.prompt is None:
            raise UnsupportedField(f"'raw' is for 'prompt', not for '{given[0]}'.", param="raw")
        if body.raw:
            parsed = self._raw(model, body, request_id)
        else:
            parsed = self._chat(model, body, request_id, given[0])
        warmth = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
        sampling = msgspec.structs.replace(parsed.request.sampling, temperature=warmth)
        return _with(_sampled(parsed, sampling), body.options)

    def _chat(self, model: str, body: RunBody, request_id: RequestId, source: str) -> Parsed:
        fields = _shared(model, body, (*_SAME, *_CHAT_ONLY))
        tools = [_tool(one, f"tools[{i}]") for i, one in enumerate(body.tools or ())]
        if tools:
            fields["tools"] = tools
        if body.response_format is not None:
            fields["response_format"] = _response_format(body.response_format)
        chat = decode(ChatBody, msgspec.json.encode({**fields, "messages": []}))
        chat = msgspec.structs.replace(chat, messages=_messages(body, source))
        return _bare(self.openai.chat_of(chat, request_id, DEFAULT_MAX_TOKENS), body)

    def _raw(self, model: str, body: RunBody, request_id: RequestId) -> Parsed:
        for field in ("tools", *_CHAT_ONLY, "response_format"):
            if getattr(body, field) not in (None, [], "none", "auto"):
                raise UnsupportedField(f"'{field}' needs the chat template.", param=field)
        fields = _shared(model, body, _SAME)
        text = decode(CompletionBody, msgspec.json.encode({**fields, "prompt": ""}))
        text = msgspec.structs.replace(text, prompt=body.prompt or "")
        return self.openai.completion_of(text, request_id, DEFAULT_MAX_TOKENS)


def check_name(model: str) -> None:
    """Raises InvalidModelName where no model could be called so."""
    if not _MODEL_NAME.fullmatch(model) or "//" in model or model.endswith("/"):
        raise InvalidModelName(f"{model[:100]!r} is no name of a model", param="model")


def check_headers(headers: Mapping[bytes, bytes]) -> None:
    """Refuse by name what an AI Gateway would do with its headers: there is none here."""
    for name, value in headers.items():
        if not name.startswith(_GATEWAY_HEADER):
            continue
        neutral = _GATEWAY_NEUTRAL.get(name)
        if neutral is None or value.strip().lower() != neutral:
            shown = name[:80].decode("latin-1")
            raise UnsupportedField(f"the header {shown!r} is not supported.", param=shown)


def _submitted(raw: bytes) -> list[QueuedBody]:
    """A batch, or one request that stands alone."""
    fields = decode(dict[str, msgspec.Raw], raw)
    if "requests" in fields:
        return decode(SubmitBody, raw).requests
    return [decode(QueuedBody, raw)]


def _refuse(body: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], at: str = "") -> None:
    for field, allowed in neutral.items():
        value = getattr(body, field)
        if value is None or value in allowed:
            continue
        hint = f"; {_ELSEWHERE[field]}" if field in _ELSEWHERE else ""
        raise UnsupportedField(f"'{at}{field}' is not supported here{hint}.", param=at + field)


def _with(parsed: Parsed, options: Options | None) -> Parsed:
    if options is None:
        return parsed
    _refuse(options, _OPTIONS, "options.")
    request = msgspec.structs.replace(parsed.request, reject_if_busy=bool(options.rejectIfBusy))
    return replace(parsed, request=request)


def _bare(parsed: Parsed, body: RunBody) -> Parsed:
    """Refusals of a bare schema name the field that it stands in."""
    form = parsed.request.response_format
    if form is None or not form.schema or _is_wrapper(body.response_format["json_schema"]):
        return parsed
    form = msgspec.structs.replace(form, param="response_format.json_schema")
    request = msgspec.structs.replace(parsed.request, response_format=form)
    return replace(parsed, request=request)


def _sampled(parsed: Parsed, sampling: Sampling) -> Parsed:
    request: GenerateRequest = msgspec.structs.replace(parsed.request, sampling=sampling)
    return replace(parsed, request=request)


def _shared(model: str, body: RunBody, names: tuple[str, ...]) -> dict[str, Any]:
    """Fields for OpenAI's body; temperature is set later, its range is another one here."""
    limit = body.max_completion_tokens or body.max_tokens
    fields = {name: getattr(body, name) for name in names}
    return {"model": model, "max_tokens": limit, **fields}


def _messages(body: RunBody, source: str) -> list[MessageIn]:
    given = getattr(body, source)
    if isinstance(given, str):
        if not given:
            raise InvalidRequest(f"'{source}' is empty.", param=source)
        return [MessageIn(role="user", content=given)]
    return [_message(one, f"{source}[{i}]") for i, one in enumerate(given)]


def _message(given: RunMessage, at: str) -> MessageIn:
    calls = [_call(one, i, f"{at}.tool_calls[{i}]") for i, one in enumerate(given.tool_calls or ())]
    return MessageIn(
        role=given.role,
        content=given.content,
        name=given.name,
        tool_calls=calls or None,
        tool_call_id=given.tool_call_id,
    )


def _call(given: NativeCall, number: int, at: str) -> ToolCallIn:
    function = given.function
    if function is None:
        if given.name is None:
            raise InvalidRequest(f"'{at}.name' is required.", param=f"{at}.name")
        arguments = given.arguments or {}
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        function = Function(name=given.name, arguments=arguments)
    return ToolCallIn(id=given.id or f"call_{number}", function=function)


def _tool(given: object, at: str) -> object:
    """OpenAI's form of a tool."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"'{at}' is no object.", param=at)
    if "function" in given:
        return given
    flat = {key: value for key, value in given.items() if key != "type"}
    return {"type": given.get("type", "function"), "function": flat}


def _response_format(given: object) -> object:
    """OpenAI's form of what is called `response_format` here."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    schema = given.get("json_schema")
    if not isinstance(schema, dict) or _is_wrapper(schema):
        return given
    return {**given, "json_schema": {"name": "response", "schema": schema, "strict": True}}


def _is_wrapper(schema: Mapping[str, object]) -> bool:
    return "schema" in schema and set(schema) <= _WRAPPER
