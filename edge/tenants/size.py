"""How large a request is, before anybody has counted: pure estimates of an edge without tokenizer.

A prompt of token ids is exact. Text is estimated by the bytes per token that answers have taught,
with a few tokens a message for what a chat template puts around it.
"""

from __future__ import annotations

import math

import msgspec

from core.types import GenerateRequest

PER_MESSAGE = 8


def prompt_bytes(request: GenerateRequest) -> int:
    """Of its text; 0 for a prompt of token ids."""
    if isinstance(request.prompt, str):
        return _bytes(request.prompt)
    total = len(msgspec.json.encode(request.tools)) if request.tools else 0
    for message in request.messages:
        total += _bytes(message.content or "")
        total += sum(_bytes(call.name) + _bytes(call.arguments) for call in message.tool_calls)
    return total


def prompt_tokens(request: GenerateRequest, text_bytes: int, bytes_per_token: float) -> int:
    if isinstance(request.prompt, tuple):
        return len(request.prompt)
    return math.ceil(text_bytes / bytes_per_token) + PER_MESSAGE * len(request.messages)


def answer_tokens(request: GenerateRequest, assumed: int, prompt: int, whole: int | None) -> int:
    """The most that all choices may take together: by the caller's limit, else `assumed` for each,
    and then no more than a whole window (`whole`) has room for beside the prompt."""
    limit, n = request.sampling.max_tokens, request.sampling.n
    if limit is not None:
        return limit * n
    if whole is None:
        return assumed * n
    return min(assumed * n, max(whole - prompt, 0))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
