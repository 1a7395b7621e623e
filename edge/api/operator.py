"""Who is the operator: whoever asks from this machine, or has the region's secret.

What a proxy passes on is not from this machine, and neither is what a browser sends for a page of
another site, or what a Worker asks: it runs here, but its author need not be the operator.
"""

from __future__ import annotations

import hmac
from typing import Any

from litestar import Request

from core.address import is_loopback
from core.errors import Forbidden
from core.headers import SECRET_HEADER

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "x-skerry-worker")

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used


def is_near(request: _Request) -> bool:
    """Asked from loopback, by the name of loopback, and not for somebody else."""
    client = request.scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    if any(name in request.headers for name in _FORWARDED):
        return False
    return _host_is_near(request.headers.get("host", ""))


def has_secret(request: _Request, secret: bytes) -> bool:
    given = request.headers.get(SECRET_HEADER, "").encode("latin-1")
    return hmac.compare_digest(given, secret)


def check_secret(request: _Request, secret: bytes) -> None:
    """Raises Forbidden."""
    if not has_secret(request, secret):
        raise Forbidden("This page is for the operator: ask from loopback, or with the secret.")


def check_operator(request: _Request, secret: bytes) -> None:
    """Raises Forbidden."""
    if not is_near(request):
        check_secret(request, secret)


def _host_is_near(host: str) -> bool:
    """A name that was made to point at loopback (DNS rebinding) is somebody else's page."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]")
    return name in ("", "localhost") or is_loopback(name)
