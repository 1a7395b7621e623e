"""Workers AI's bodies as structs, field by field, with the ranges of its documentation.

Every field that its text models document is here, so that one we cannot honour is refused by name
instead of as unknown; `api.workers_ai` says which values are honoured. `/openapi.json` publishes
the same structs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from edge.api.openai_types import (
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
    ChatBody,
    CompletionBody,
    ContentPart,
    Function,
    UsageOut,
)
from edge.api.workers_ai_errors import ErrorOut

DEFAULT_MAX_TOKENS = 256
DEFAULT_TEMPERATURE = 0.6
MAX_REQUESTS = 1000
"""Of one batch."""

_Limit = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request is run, beside what is asked. The others are known and refused by name."""

    rejectIfBusy: bool | None = None
    """Refuse with 3040 at once instead of waiting for capacity."""
    queueRequest: bool | None = None
    """Only false: what is to be queued says so in the query."""
    gateway: Any = None
    extraHeaders: Any = None
    returnRawResponse: bool | None = None


class NativeCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call that an earlier turn made: Cloudflare's form (name, arguments) or OpenAI's."""

    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: Function | None = None
    name: str | None = None
    arguments: dict[str, Any] | str | None = None


class RunMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[NativeCall] | None = None
    tool_call_id: str | None = None


class RunBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST …/ai/run/{model}`: one of `prompt`, `messages` and `input`. null is absent."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: list[RunMessage] | None = None
    input: str | list[RunMessage] | None = None
    raw: bool | None = None
    """`prompt` goes to the model as it is, without the chat template."""
    stream: bool | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=50)] | None = None
    seed: Annotated[int, Meta(ge=1, le=9_999_999_999)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    """Cloudflare documents 0 too, by which no logit can be divided."""
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    stop: str | list[str] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    response_format: Any = None
    """`json_schema` is the bare schema; OpenAI's wrapper is taken too."""
    tools: list[Any] | None = None
    """`{name, description, parameters}`, or OpenAI's form."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    options: Options | None = None
    prompt_cache_key: str | None = None
    # carried for the caller's own records
    user: str | None = None
    metadata: dict[str, str] | None = None
    # known, honoured at their neutral value only
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    lora: str | None = None
    functions: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Any = None
    prediction: Any = None
    stream_options: Any = None
    # of the queue, where the query asks for it
    request_id: str | None = None
    requests: Any = None


class QueuedBody(RunBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of a batch."""

    external_reference: str | None = None


class SubmitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST …/ai/run/{model}?queueRequest=true`: what is to be queued."""

    requests: Annotated[list[QueuedBody], Meta(min_length=1, max_length=MAX_REQUESTS)]


class PollBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same route: how far it is."""

    request_id: str


class TwinChatBody(ChatBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST …/ai/v1/chat/completions`: OpenAI's body with Cloudflare's options."""

    options: Options | None = None


class TwinTextBody(CompletionBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    options: Options | None = None


class NativeCallOut(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is a JSON object; `index` counts the calls of an answer."""

    index: int
    id: str
    name: str
    arguments: msgspec.Raw


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """`response` is text, or the JSON itself where JSON was asked for."""

    response: Any
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[NativeCallOut] | UnsetType = UNSET
    finish_reason: str
    usage: UsageOut


class RunChunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the native stream. The last one has `finish_reason` and `usage`."""

    response: str = ""
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[NativeCallOut] | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    usage: UsageOut | UnsetType = UNSET


class QueuedOut(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was accepted, or is not done. `status`: queued or running."""

    status: str
    request_id: str
    model: str


class BatchAnswerOut(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a batch; `id` counts its requests from 0."""

    id: int
    result: RunResult | None
    success: bool
    errors: list[ErrorOut] = msgspec.field(default_factory=list)
    external_reference: str | None


class BatchOut(msgspec.Struct, frozen=True, kw_only=True):
    responses: list[BatchAnswerOut]
    usage: UsageOut


class TaskOut(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    description: str


class PropertyOut(msgspec.Struct, frozen=True, kw_only=True):
    property_id: str
    value: str


class FoundModel(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    source: int
    name: str
    description: str
    task: TaskOut
    created_at: str
    tags: list[str]
    properties: list[PropertyOut]
