"""OpenAI's requests, parsed once: a body becomes a `Parsed` that is valid by type, or a refusal.

A field we do not honour yet is refused by name unless it holds its neutral value: a caller must
never believe in something that was quietly dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from core.config import Topology
from core.errors import InvalidRequest, ModelNotFound, UnsupportedField
from core.nearest import did_you_mean
from core.types import (
    GenerateRequest,
    Message,
    ModelName,
    RequestId,
    ToolCall,
)
from edge.api.body import decode
from edge.api.openai_types import ChatBody, CompletionBody, ContentPart, MessageIn
from edge.api.sampling import COMPLETION_MAX_TOKENS, sampling, token_ids
from edge.api.tools import read_response_format, read_tools

_ROLES = ("system", "user", "assistant", "tool", "developer")
_SEED_MASK = 2**64 - 1

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
    "echo": (False,),
    "suffix": ("",),
}
"""What a known field may hold besides null."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request with what its answer's form needs. `asked_model`: the name the caller used."""

    request: GenerateRequest
    asked_model: str
    stream: bool
    include_usage: bool
    affinity: str | None


@dataclass(frozen=True, slots=True)
class Intake:
    """What the parsers need to know of the world."""

    topology: Topology
    clock: Callable[[], float] = time.time

    def chat(self, raw: bytes, request_id: RequestId) -> Parsed:
        """Raises InvalidRequest, UnsupportedField, ModelNotFound."""
        return self.chat_of(decode(ChatBody, raw), request_id)

    def chat_of(
        self, body: ChatBody, request_id: RequestId, default_limit: int | None = None
    ) -> Parsed:
        """`default_limit`: tokens of an answer for which the caller named no limit; it gives way
        where the context has less room. None: to the end of the turn."""
        _refuse_unsupported(body)
        if not body.messages:
            raise InvalidRequest("'messages' must hold at least one message.", param="messages")
        messages = tuple(message_of(one, f"messages[{i}]") for i, one in enumerate(body.messages))
        limit = body.max_completion_tokens or body.max_tokens
        parsed = self._parsed(
            body, request_id, limit, default_limit, messages=messages, prompt=None
        )
        return replace(parsed, request=_with_form(parsed.request, body))

    def completion(self, raw: bytes, request_id: RequestId) -> Parsed:
        """Raises InvalidRequest, UnsupportedField, ModelNotFound."""
        return self.completion_of(decode(CompletionBody, raw), request_id, COMPLETION_MAX_TOKENS)

    def completion_of(
        self, body: CompletionBody, request_id: RequestId, default_limit: int
    ) -> Parsed:
        """As `chat_of`, for a raw prompt."""
        _refuse_unsupported(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise _unsupported("best_of", "null or what 'n' is")
        return self._parsed(
            body,
            request_id,
            body.max_tokens,
            default_limit,
            messages=(),
            prompt=_prompt(body.prompt),
        )

    def _parsed(
        self,
        body: ChatBody | CompletionBody,
        request_id: RequestId,
        limit: int | None,
        default_limit: int | None,
        *,
        messages: tuple[Message, ...],
        prompt: str | tuple[int, ...] | None,
    ) -> Parsed:
        options = body.stream_options
        if options is not None and not body.stream:
            raise InvalidRequest(
                "'stream_options' is allowed only together with 'stream': true.",
                param="stream_options",
            )
        seed = secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK
        request = GenerateRequest(
            id=request_id,
            model=self.model_named(body.model),
            messages=messages,
            prompt=prompt,
            sampling=sampling(body, limit, default_limit),
            seed=seed,
            rendered_at=int(self.clock()),
            deadline_s=self.topology.limits.deadline_s,
        )
        return Parsed(
            request=request,
            asked_model=body.model,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            affinity=body.prompt_cache_key or None,
        )

    def model_named(self, name: str) -> ModelName:
        """By its name or an alias. Raises ModelNotFound."""
        canonical = self.topology.canonical_model(name)
        if canonical is None:
            raise unknown_model(self.topology, name)
        return canonical


def _with_form(request: GenerateRequest, body: ChatBody) -> GenerateRequest:
    """The request with the tools and the form of its answer. Raises InvalidRequest,
    UnsupportedField."""
    tooling = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    form = read_response_format(body.response_format)
    return msgspec.structs.replace(
        request,
        tools=tooling.tools,
        tool_choice=tooling.choice,
        forced_tool=tooling.forced,
        parallel_tool_calls=tooling.parallel,
        response_format=form,
    )


def unknown_model(topology: Topology, name: str) -> ModelNotFound:
    """The refusal of a model name, with the nearest one."""
    known = [*topology.models, *(a for m in topology.models.values() for a in m.aliases)]
    shown = name if len(name) <= 100 else name[:100] + "…"
    hint = did_you_mean(shown, known, "GET /v1/models lists those that do.")
    return ModelNotFound(f"The model {shown!r} does not exist; {hint}", param="model")


def _refuse_unsupported(body: ChatBody | CompletionBody) -> None:
    for field in body.__struct_fields__:
        neutral = _NEUTRAL.get(field)
        value = getattr(body, field)
        if neutral is not None and value is not None and value not in neutral:
            allowed = ", ".join(msgspec.json.encode(one).decode() for one in neutral)
            raise _unsupported(field, f"null or {allowed}" if neutral else "null")


def _unsupported(field: str, allowed: str) -> UnsupportedField:
    return UnsupportedField(
        f"'{field}' is not supported yet; allowed here: {allowed}.", param=field
    )


def _prompt(prompt: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        raise InvalidRequest("'prompt' is empty.", param="prompt")
    first = prompt[0]
    if isinstance(first, int):
        return token_ids(prompt, "prompt")
    if len(prompt) > 1:
        raise UnsupportedField("'prompt' may hold one prompt, not several.", param="prompt")
    return first if isinstance(first, str) else token_ids(first, "prompt")


def message_of(given: MessageIn, at: str) -> Message:
    """`at`: the field that it stands in, for refusals. Raises InvalidRequest, UnsupportedField."""
    for field in ("annotations", "audio", "function_call", "refusal"):
        if getattr(given, field):
            raise UnsupportedField(f"'{at}.{field}' is not supported yet.", param=f"{at}.{field}")
    if given.role == "function":
        raise UnsupportedField(
            f"'{at}.role': 'function' is not supported; use 'tool'.", param=f"{at}.role"
        )
    if given.role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequest(
            f"'{at}.role': {given.role[:40]!r} is none of {known}.", param=f"{at}.role"
        )
    calls = given.tool_calls if given.role == "assistant" and given.tool_calls else ()
    content = _content(given.content, at)
    if content is None and not calls:
        raise InvalidRequest(f"'{at}.content' is required.", param=f"{at}.content")
    return Message(
        role=given.role,
        content=content,
        name=given.name,
        tool_calls=tuple(
            ToolCall(id=one.id, name=one.function.name, arguments=one.function.arguments)
            for one in calls
        ),
        tool_call_id=given.tool_call_id if given.role == "tool" else None,
    )


def _content(content: str | list[ContentPart] | None, at: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        where = f"{at}.content[{i}]"
        if part.type != "text":
            raise UnsupportedField(
                f"'{where}.type': {part.type[:40]!r} is not supported yet; only 'text' is.",
                param=f"{where}.type",
            )
        if part.prompt_cache_breakpoint is not None:
            raise _unsupported(f"{where}.prompt_cache_breakpoint", "null")
        if part.text is None:
            raise InvalidRequest(f"'{where}.text' is required.", param=f"{where}.text")
        texts.append(part.text)
    if not texts:
        raise InvalidRequest(f"'{at}.content' is empty.", param=f"{at}.content")
    return "".join(texts)
