"""The event stream of one generation, from a decode node's front to the edge.

A closed union with a mandatory end::

    Accepted  (Moved | Delta | Finish)*  (Done | Fault)

`Fault` may also come first. A stream that stops without `Done` or `Fault` is an
`IncompleteStream`. The router passes frames through unopened.
"""

from __future__ import annotations

import msgspec

from core.framing import FrameDecoder, encode_frame
from core.types import FinishReason, NodeName, Timings, Usage

__all__ = [
    "Accepted", "Delta", "Done", "Event", "Fault", "Finish", "Moved", "Placing",
    "TokenLogprob", "ToolCallDelta", "encode_frame", "event_decoder",
]  # fmt: skip


class Placing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the router weighed when it placed a request. Tokens are of the prompt; seconds are its
    estimates of what is lost by all who wait, None where there was nothing to weigh."""

    reusable_tokens: int = 0
    """The most that any pool of the region holds."""
    held_tokens: int = 0
    """Held by the node that reads."""
    pulled_tokens: int = 0
    """Fetched for it from `pulled_from`."""
    pulled_from: NodeName | None = None
    compute_tokens: int = 0
    """Left for it to compute."""
    alone_s: float | None = None
    """Read by the decode node itself."""
    split_s: float | None = None
    """Read by a prefill node and handed over."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted", tag_field="kind"):
    """The request is placed. `prefill` None: the decode node reads the prompt itself."""

    prefill: NodeName | None
    decode: NodeName
    prompt_tokens: int
    reason: str = ""
    """Why these nodes: a value of `regional.placement.Reason`."""
    placing: Placing | msgspec.UnsetType = msgspec.UNSET


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag="moved", tag_field="kind"):
    """The request was placed again; later events come from these nodes. Before its first delta
    because an attempt failed, after it because the answer was pushed out of a node's memory: the
    next delta goes on where the last one ended."""

    prefill: NodeName | None
    decode: NodeName
    reason: str = ""
    placing: Placing | msgspec.UnsetType = msgspec.UNSET


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log probability of one token, with the best alternatives in falling order."""

    token: str
    utf8: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a tool call; `id` and `name` come with the first piece of an index only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta", tag_field="kind"
):
    """A streamed piece: the tokens of one engine step of one choice.

    Every generated token id appears in exactly one delta; `text` may be empty while a character
    or a possible stop string is incomplete. Joined texts are the answer. `logprobs`, where they
    were asked for, belong to `text`: a token's entry may come in a later delta than its id.
    """

    choice: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish", tag_field="kind"):
    """One choice is complete."""

    choice: int = 0
    reason: FinishReason


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done", tag_field="kind"):
    """The regular end of the stream."""

    usage: Usage
    timings: Timings = Timings()


class Fault(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fault", tag_field="kind"
):
    """The irregular end of the stream: the wire form of a `core.errors.RequestError`."""

    code: str
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    param: str | None = None


Event = Accepted | Moved | Delta | Finish | Done | Fault


def event_decoder() -> FrameDecoder[Event]:
    """A decoder for one stream."""
    return FrameDecoder[Event](Event)
