"""Cloudflare's envelope around answers and refusals, and the statuses of its error codes.

The code of each failure stands in `core.errors`; what is here is its HTTP status where Cloudflare's
table has another one than ours: it knows no 404 for a model, no 499 and no 5xx for capacity.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from core.errors import NoCapacity, RequestError

CLOUDFLARE = "/client/v4/"
"""What the paths of Cloudflare's API begin with."""

_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")

STATUSES = {
    3003: 400,  # incomplete request
    3006: 413,  # request too large
    3007: 408,  # timeout
    3008: 408,  # aborted
    3036: 429,  # the account's daily quota
    3040: 429,  # no capacity
    3042: 404,  # a name that no model could have
    5005: 405,  # no LoRA on this model
    5007: 400,  # no such model
    5018: 403,  # the account may not use this model
}
BUSY = "Capacity temporarily exceeded, please try again."
"""How Cloudflare words a lack of capacity; clients look for it."""


class ErrorOut(msgspec.Struct, frozen=True, kw_only=True):
    code: int
    message: str


class Envelope(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """What every JSON answer of Cloudflare's API comes in; `result` is null where it failed."""

    result: _T
    success: bool
    errors: list[ErrorOut]
    messages: list[str]


def enveloped(result: msgspec.Struct) -> bytes:
    return _encode(Envelope(result=result, success=True, errors=[], messages=[]))


def error_out(error: RequestError) -> ErrorOut:
    message = error.message
    if isinstance(error, NoCapacity):
        message = f"{BUSY} ({message})"
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return ErrorOut(code=error.cloudflare_code, message=message)


class CloudflareErrors:
    """The `ErrorForm` of Cloudflare's own routes."""

    def status(self, error: RequestError) -> int:
        return STATUSES.get(error.cloudflare_code, error.http_status)

    def body(self, error: RequestError) -> bytes:
        return _encode(Envelope(result=None, success=False, errors=[error_out(error)], messages=[]))

    def event(self, error: RequestError) -> bytes:
        return b"data: " + self.body(error) + b"\n\n"
