"""OpenAI's bodies as structs: what comes in and what goes out, field by field.

Incoming structs hold every field that OpenAI documents, so that one we cannot honour is refused by
name instead of as unknown; `api.openai` says which values are honoured. They are also what
`/openapi.json` publishes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

_Temperature = Annotated[float, Meta(ge=0, le=2)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Limit = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]

MAX_CHOICES = 16
MAX_BIASES = 1024
MAX_BIAS = 100
"""Of a logit, either way."""
MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 5
"""Alternatives in the legacy form."""

_BIAS_KEY = {"pattern": "^(0|[1-9][0-9]*)$"}
_BIAS = {"minimum": -MAX_BIAS, "maximum": MAX_BIAS}
_Bias = Annotated[
    dict[
        Annotated[str, Meta(extra_json_schema=_BIAS_KEY)],
        Annotated[float, Meta(extra_json_schema=_BIAS)],
    ],
    Meta(max_length=MAX_BIASES),
]
"""Token ids as JSON text; `api.sampling` checks keys and values, so that it can name them."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is padded."""


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and legacy completions share. null is the same as absent everywhere."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: _Limit | None = None
    temperature: _Temperature | None = None
    top_p: _Share | None = None
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: _Bias | None = None
    # ours, also known from other open servers
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    # carried for the caller's own records
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """An affinity id: requests that share it go to one region."""
    # known, honoured at their neutral value only
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str = ""
    parsed_arguments: Any = None
    """Echoed by clients that parse; `arguments` is what counts."""


class ToolCallIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: Function
    type: Literal["function"] = "function"
    index: int | None = None
    """Echoed by clients that joined a stream."""


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    prompt_cache_breakpoint: Any = None


class MessageIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None
    # what clients echo from earlier answers
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    parsed: Any = None


class FunctionIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` is a JSON Schema; absent, the function takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only the type "function" is honoured."""

    type: str
    function: FunctionIn | None = None
    custom: Any = None


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: FunctionName | None = None
    custom: Any = None
    allowed_tools: Any = None


class JsonSchemaIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`strict` false is enforced like true."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormatIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of text, json_object, json_schema."""

    type: str
    json_schema: JsonSchemaIn | None = None


class ChatBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[MessageIn]
    max_completion_tokens: _Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatIn | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None


class CompletionBody(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    """Honoured where it is `n`: nothing is then thrown away."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: str | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageOut(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class FunctionOut(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str


class ToolCallOut(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionOut


class MessageOut(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null when the answer is calls alone."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallOut] | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """`token` shows bytes that are no character of their own as \\xNN; `bytes` has them."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: MessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageOut


class FunctionPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPiece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first of an index has id, type and name; those after it have arguments alone."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionPiece


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is absent unless the caller asked for it, then null on all chunks but the last."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageOut | UnsetType | None = UNSET


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists with one entry for each token. `text_offset` counts characters of the answer;
    `top_logprobs` has the sampled token too, whatever its rank."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Legacy completions: the same shape for the answer and for each chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageOut | UnsetType | None = UNSET


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ModelOut(msgspec.Struct, frozen=True, kw_only=True):
    """`context_length` in tokens, null while no region that has the model is known."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "skerry"
    context_length: int | None
    aliases: list[str]
    ready: bool


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelOut]
