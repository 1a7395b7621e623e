"""`GET /internal/v1/keys`: the key file for edges that follow this one (digests, no keys)."""

from __future__ import annotations

import hashlib
from typing import Any

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from edge.api.operator import check_secret
from edge.tenants.keyring import Keyring

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used


def keys_handler(keyring: Keyring, secret: bytes) -> HTTPRouteHandler:
    """Open to whoever has the region's secret."""

    @get("/internal/v1/keys")
    async def keys(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        made = {"x-skerry-keys-made": "yes"} if keyring.book().made else {}
        etag = f'"{hashlib.sha256(keyring.text).hexdigest()}{"-made" if made else ""}"'
        same = request.headers.get("if-none-match") == etag
        return Response(
            b"" if same else keyring.text,
            status_code=304 if same else 200,
            media_type="application/jsonl",
            headers={"etag": etag, **made},
        )

    return keys
