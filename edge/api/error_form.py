"""How a dialect says that something went wrong: as a whole answer, or inside a stream."""

from __future__ import annotations

from typing import Protocol

from core.errors import RequestError
from edge.api.openai_render import error_body, error_event


class ErrorForm(Protocol):
    """One dialect's form of a refusal."""

    def status(self, error: RequestError) -> int: ...

    def body(self, error: RequestError) -> bytes:
        """The JSON answer."""
        ...

    def event(self, error: RequestError) -> bytes:
        """The last event of a stream that has begun; nothing follows it, not even [DONE]."""
        ...


class OpenAIErrors:
    def status(self, error: RequestError) -> int:
        return error.http_status

    def body(self, error: RequestError) -> bytes:
        return error_body(error)

    def event(self, error: RequestError) -> bytes:
        return error_event(error)
