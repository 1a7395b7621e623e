"""Every failure that has a name.

::

    SkerryError
    ├── ConfigError                    the operator's topology or machine; never crosses HTTP
    └── RequestError                   answers a request; the fields below are fixed per class
        ├── CallerError                the caller can mend it
        │   ├── InvalidRequest         400 invalid_request
        │   │   ├── IncompleteRequest      400 incomplete_request
        │   │   ├── UnsupportedField       400 unsupported_field
        │   │   │   └── LoraUnsupported        400 lora_unsupported
        │   │   ├── TemplateRefused        400 template_refused
        │   │   ├── WorkerRefused          400 worker_refused     its code or its settings
        │   │   └── ContextLengthExceeded  400 context_length_exceeded
        │   ├── Unauthorized           401 invalid_api_key
        │   ├── Forbidden              403 forbidden
        │   ├── NotFound               404 not_found
        │   │   └── ModelNotFound          404 model_not_found
        │   │       └── InvalidModelName       404 invalid_model_name
        │   ├── MethodNotAllowed       405 method_not_allowed
        │   ├── RequestTimeout         408 request_timeout
        │   ├── BodyTooLarge           413 body_too_large
        │   ├── UnsupportedEncoding    415 unsupported_encoding
        │   ├── JsonModeUnmet          400 json_mode_unmet
        │   ├── Cancelled              499 cancelled
        │   └── QuotaExceeded          429 quota_exceeded     a day's
        │       └── RateLimited            429 rate_limit_exceeded  a minute's, or streams
        └── ServiceError               we can mend it
            ├── NoCapacity             429 no_capacity        retryable
            ├── Draining               503 draining           retryable
            ├── LimitsUnavailable      503 limits_unavailable
            ├── RegionUnavailable      503 region_unavailable retryable
            ├── NodeLost               503 node_lost          retryable
            ├── TransferFailed         503 transfer_failed    retryable
            ├── IncompleteStream       502 incomplete_stream  retryable
            ├── VersionSkew            502 version_skew
            ├── DeadlineExceeded       504 deadline_exceeded
            ├── WorkerFailed           500 worker_failed      a script of an application's
            ├── WorkerResting          503 worker_resting     one that was ended too often
            └── InternalError          500 internal_error

`code` is stable: it is the wire code, the metric label and the OpenAI `error.code`;
`cloudflare_code` is the number that Workers AI has for it, or the nearest. Dialects
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
    themselves. `told` stands for the message on the wire where that is for the operator's log.
    """

    code: ClassVar[str]
    http_status: ClassVar[int]
    grpc_code: ClassVar[str]
    cloudflare_code: ClassVar[int]
    retryable: ClassVar[bool] = False
    told: ClassVar[str] = ""

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
    code, http_status, grpc_code, cloudflare_code = "invalid_request", 400, "INVALID_ARGUMENT", 8001


class IncompleteRequest(InvalidRequest):
    """The body, or the part of it that says what is asked, is missing."""

    code, cloudflare_code = "incomplete_request", 3003


class UnsupportedField(InvalidRequest):
    code = "unsupported_field"


class LoraUnsupported(UnsupportedField):
    code, cloudflare_code = "lora_unsupported", 5005


class TemplateRefused(InvalidRequest):
    code = "template_refused"


class WorkerRefused(InvalidRequest):
    """A Worker that cannot be served: what it is, or what it asks for, does not fit."""

    code, cloudflare_code = "worker_refused", 10021


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


class InvalidModelName(ModelNotFound):
    """No model could have such a name."""

    code, cloudflare_code = "invalid_model_name", 3042


class MethodNotAllowed(CallerError):
    code, http_status, grpc_code, cloudflare_code = "method_not_allowed", 405, "UNIMPLEMENTED", 7001


class RequestTimeout(CallerError):
    """The caller did not send its request in time."""

    code, http_status, grpc_code, cloudflare_code = (
        "request_timeout",
        408,
        "DEADLINE_EXCEEDED",
        3007,
    )


class BodyTooLarge(CallerError):
    code, http_status, grpc_code, cloudflare_code = (
        "body_too_large",
        413,
        "RESOURCE_EXHAUSTED",
        3006,
    )


class UnsupportedEncoding(CallerError):
    code, http_status, grpc_code, cloudflare_code = (
        "unsupported_encoding",
        415,
        "INVALID_ARGUMENT",
        8001,
    )


class JsonModeUnmet(CallerError):
    """The answer came to its token limit before it was the JSON that was asked for."""

    code, http_status, grpc_code, cloudflare_code = "json_mode_unmet", 400, "OUT_OF_RANGE", 5024


class Cancelled(CallerError):
    code, http_status, grpc_code, cloudflare_code = "cancelled", 499, "CANCELLED", 3008


class QuotaExceeded(CallerError):
    code, http_status, grpc_code, cloudflare_code = (
        "quota_exceeded",
        429,
        "RESOURCE_EXHAUSTED",
        3036,
    )


class RateLimited(QuotaExceeded):
    code, cloudflare_code = "rate_limit_exceeded", 971


class NoCapacity(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "no_capacity", 429, "RESOURCE_EXHAUSTED", 3040
    retryable = True


class Draining(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "draining", 503, "UNAVAILABLE", 3040
    retryable = True


class LimitsUnavailable(ServiceError):
    """Nobody can say how much a tenant has left. Not retryable: another region knows no more."""

    code, http_status, grpc_code, cloudflare_code = "limits_unavailable", 503, "UNAVAILABLE", 3040


class RegionUnavailable(ServiceError):
    code, http_status, grpc_code, cloudflare_code = "region_unavailable", 503, "UNAVAILABLE", 3040
    retryable = True


class NodeLost(ServiceError):
    """The message may name nodes, processes and what they wrote last: callers are not told it."""

    told = "the node that computed this answer was lost"
    code, http_status, grpc_code, cloudflare_code = "node_lost", 503, "UNAVAILABLE", 3040
    retryable = True


class TransferFailed(ServiceError):
    """The message may have addresses of nodes."""

    told = "what was computed of this answer could not be handed to another node"
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


class WorkerFailed(ServiceError):
    """A Worker threw, ended or said nothing; what it said itself is for its `tail` alone."""

    code, http_status, grpc_code, cloudflare_code = "worker_failed", 500, "ABORTED", 1101


class WorkerResting(ServiceError):
    """A Worker that was ended again and again for what it does, and is not started for a while."""

    code, http_status, grpc_code, cloudflare_code = "worker_resting", 503, "UNAVAILABLE", 1102


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
        message=error.told or error.message,
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
