"""The types that cross process borders, each defined once.

All are frozen msgspec structs that travel as msgpack maps. Rules for whoever edits them:
a field may be added with a default, never renamed, retyped or given another default
(golden bytes in tests/core/golden hold this); a receiver ignores fields it does not know.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, NewType

import msgspec

RequestId = NewType("RequestId", str)
RegionName = NewType("RegionName", str)
EdgeName = NewType("EdgeName", str)
NodeName = NewType("NodeName", str)


class PoolId(NamedTuple):
    """A KV pool of a region: a node has one for each data-parallel rank."""

    node: NodeName
    dp_rank: int = 0


ModelName = NewType("ModelName", str)

WIRE_VERSION = 1
"""Version of every struct and frame between our own processes; see DESIGN §5, compatibility."""

BLOCK_TOKENS = 16
"""Tokens of KV in one block, for every KV group."""


class Role(StrEnum):
    """What a node does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    COMBINED = "combined"


class FinishReason(StrEnum):
    """Why a choice ended. The values are OpenAI's. A value of a newer peer's reads as STOP: the
    choice is complete, and why is said in a word that we do not have."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        return cls.STOP if isinstance(value, str) else None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that an earlier assistant turn made; `arguments` is JSON text as the client sent."""

    id: str
    name: str
    arguments: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, content parts already joined to text."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class ToolChoice(StrEnum):
    """Whether an answer may, must or must not call tools. The values are OpenAI's."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may ask for. `parameters` is a JSON Schema as text, keys in the
    caller's order; "" means that it takes none. `strict`: its arguments must fit the schema even
    where a call is not forced."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer is JSON that fits `schema`, a JSON Schema as text; "" takes any object.
    `param`: the caller's field that says so, for refusals."""

    schema: str = ""
    param: str = "response_format"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when generation ends.

    Valid by construction: the dialect parsers of `edge/api` refuse what is out of range.
    `max_tokens` None means "to the end of the turn or of the context".
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every candidate."""
    max_tokens: int | None = None
    max_tokens_yields: bool = False
    """`max_tokens` is a dialect's default, not the caller's wish: where the context has less room
    it gives way instead of being refused. The router resolves it."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """The model's own end tokens do not end the answer; the caller's still do."""
    min_p: float = 0.0
    """Candidates below this share of the best one's probability are dropped; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or answer are divided by it, or multiplied where negative."""
    presence_penalty: float = 0.0
    """Taken once from the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Taken from the logits of the answer's tokens as often as it has them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); no id twice."""
    min_tokens: int = 0
    """No end token before so many tokens, and no stop string that begins in them."""
    n: int = 1
    """Choices, of one prompt."""
    logprobs: int | None = None
    """How many alternatives each token is reported with; None reports no log probabilities."""


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an interrupted choice stood: what was generated and how much of its text was sent.

    `chars_sent` counts the text as the model wrote it: of an answer that calls tools, what stands
    before the calls are read out of it.
    """

    choice: int
    token_ids: tuple[int, ...]
    chars_sent: int


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation, parsed once at the edge and valid from then on.

    Exactly one of `messages` (chat) and `prompt` (raw text or token ids) is given.
    `seed` is always set: the edge draws one when the caller gave none, so that a request that
    is placed twice gives the same text. `rendered_at` is Unix seconds and is what a chat template
    sees as now. `deadline_s` is what is left when the message is sent, never a clock time.
    """

    id: RequestId
    model: ModelName
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    seed: int
    rendered_at: int
    deadline_s: float = 600.0
    priority: int = 0
    """Lower is served first; 0 is interactive."""
    namespace: str = ""
    """Whose prefixes may be shared; set by the edge, never by the client."""
    resume: tuple[ResumePoint, ...] = ()
    route_chain: bytes = b""
    """Ids of the prompt's text blocks, joined (core.prefix): what the region counts and publishes
    as cached. Set by the edge; empty when it routes by something else."""
    route_ends: tuple[int, ...] = ()
    """Bytes of prompt text that each id of `route_chain` covers, and last the whole prompt's."""
    tools: tuple[Tool, ...] = ()
    """Offered to the model by its chat template. Past the reader they have names only."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str = ""
    """With REQUIRED: the one tool to call, by name; "" is any."""
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    """None: free text."""
    grammar: str = ""
    """What every token of the answer must fit, compiled by the reader (core.text.grammar)."""
    reject_if_busy: bool = False
    """Refuse at once instead of waiting in a queue, at the edge or in the region."""
    trace: str = ""
    """W3C's traceparent of whoever sends it on: the edge's attempt, then the router's. Empty where
    nobody collects traces."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a whole request.

    `cached_tokens`: prompt tokens that nobody computed for this request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the time went, in seconds, and what crossed between nodes, in bytes."""

    queue_s: float = 0.0
    """From the region's acceptance of the request until it was placed on nodes."""
    prefill_s: float = 0.0
    """From placement until the first token was sampled."""
    decode_s: float = 0.0
    """From the first token to the last."""
    transfer_s: float = 0.0
    """First byte to last verified byte of the KV hand-off; 0 without one."""
    kv_bytes: int = 0
