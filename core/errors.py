"""Every failure that has a name.

::

    SkerryError
    ├── ConfigError                    the operator's topology or machine; never crosses HTTP
    └── RequestError                   answers a request; the fields below are fixed per class
        ├── CallerError                the caller can mend it
        │   ├── InvalidRequest         400 invalid_request
        │   │   ├── UnsupportedField       400 unsupported_field
        │   │   ├── TemplateRefused        400 template_refused
        │   │   └── ContextLengthExceeded  400 context_length_exceeded
        │   ├── Unauthorized           401 invalid_api_key
        │   ├── Forbidden              403 forbidden
        │   ├── NotFound               404 not_found
        │   │   └── ModelNotFound          404 model_not_found
        │   ├── MethodNotAllowed       405 method_not_allowed
        │   ├── BodyTooLarge           413 body_too_large
        │   ├── Cancelled              499 cancelled
        │   └── QuotaExceeded          429 quota_exceeded
        └── ServiceError               we can mend it
            ├── NoCapacity             429 no_capacity        retryable
            ├── Draining               503 draining           retryable
            ├── RegionUnavailable      503 region_unavailable retryable
            ├── NodeLost               503 node_lost          retryable
            ├── TransferFailed         503 transfer_failed    retryable
            ├── IncompleteStream       502 incomplete_stream  retryable
            ├── VersionSkew            502 version_skew
            ├── DeadlineExceeded       504 deadline_exceeded
            └── InternalError          500 internal_error

`code` is stable: it is the wire code, the metric label and the OpenAI `error.code`. Dialects
render status and shape; nothing outside this file decides them. `from_fault` and `to_fault` map
to and from the wire; an unknown code from a newer peer becomes an `InternalError` with its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from core.events import Fault


class SkerryError(Exception):
    """Base of all; not raised itself."""


class ConfigError(SkerryError):
    """The topology, an option or the machine does not fit; the message says what to do."""


class RequestError(SkerryError):
    """Base of everything that answers a request; not raised itself.

    `param` names the offending request field. `retry_after_s` is for refusals that pass by
    themselves.
    """

    code: ClassVar[str]
    http_status: ClassVar[int]
    grpc_code: ClassVar[str]
    cloudflare_code: ClassVar[int]
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class CallerError(RequestError):
    """The caller can mend it."""


class ServiceError(RequestError):
    """We can mend it."""


class InvalidRequest(CallerError):
    code, http_status, grpc_code, cloudflare_code = "invalid_request", 400, "INVALID_ARGUMENT", 3003


class UnsupportedField(InvalidRequest):
    code = "unsupported_field"


class TemplateRefused(InvalidRequest):
    code = "template_refused"


class ContextLengthExceeded(InvalidRequest):
    code, cloudflare_code = "context_length_exceeded", 5021


class Unauthorized(CallerError):
    code, http_status, grpc_code, cloudflare_code = "invalid_api_key", 401, "UNAUTHENTICATED", 10000


class Forbidden(CallerError):
    code, http_status, grpc_code, cloudflare_code = "forbidden", 403, "PERMISSION_DENIED", 5018


class NotFound(CallerError):
    code, http_status, grpc_code, cloudflare_code = "not_found", 404, "NOT_FOUND", 7003


class ModelNotFound(NotFound):
    code, cloudflare_code = "model_not_found", 5007


class MethodNotAllowed(CallerError):
    code, http_status, grpc_code, cloudflare_code = "method_not_allowed", 405, "UNIMPLEMENTED", 7001


class BodyTooLarge(CallerError):
    code, http_status, grpc_code, cloudflare_code = (
        "body_too_large",
        413,
        "RESOURCE_EXHAUSTED",
        3006,
    )


class Cancelled(CallerError):
    code, http_status, grpc_code, cloudflare_code = "cancelled", 499, "CANCELLED", 3007


class QuotaExceeded(CallerError):
    code, http_status, grpc_code, cloudflare_code = (
        "quota_exceeded",
        429,
        "RESOURCE_EXHAUSTED",
        3036,
    )


class NoCapacity(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "no_capacity", 429, "RESOURCE_EXHAUSTED", 3040
    retryable = True


class Draining(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "draining", 503, "UNAVAILABLE", 3040
    retryable = True


class RegionUnavailable(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "region_unavailable", 503, "UNAVAILABLE", 3040
    retryable = True


class NodeLost(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "node_lost", 503, "UNAVAILABLE", 3040
    retryable = True


class TransferFailed(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "transfer_failed", 503, "UNAVAILABLE", 3040
    retryable = True


class IncompleteStream(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "incomplete_stream", 502, "UNAVAILABLE", 3040
    retryable = True


class VersionSkew(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "version_skew", 502, "FAILED_PRECONDITION", 3040


class DeadlineExceeded(ServiceError):
    code, http_status, grpc_code, cloudflare_code = (
        "deadline_exceeded", 504, "DEADLINE_EXCEEDED", 3007,
    )  # fmt: skip


class InternalError(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "internal_error", 500, "INTERNAL", 3043


def _concrete(base: type[RequestError]) -> dict[str, type[RequestError]]:
    found: dict[str, type[RequestError]] = {}
    for child in base.__subclasses__():
        if "code" in vars(child):
            found[child.code] = child
        found |= _concrete(child)
    return found


BY_CODE: dict[str, type[RequestError]] = _concrete(RequestError)


def to_fault(error: RequestError) -> Fault:
    """The wire form of `error`."""
    from core.events import Fault  # events imports framing, which imports this module

    return Fault(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
        param=error.param,
    )


def from_fault(fault: Fault) -> RequestError:
    """The error that `fault` stands for."""
    kind = BY_CODE.get(fault.code)
    if kind is None:
        return InternalError(f"{fault.code}: {fault.message}")
    return kind(fault.message, param=fault.param, retry_after_s=fault.retry_after_s)
