"""`Request`, `Response` and `FetchResponse`, as Cloudflare's Python SDK has them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPMethod, HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from .body import Body, as_json, source_of
from .headers import Headers
from .streams import ReadableStream

BODILESS = frozenset({101, 103, 204, 205, 304})
REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Request(Body):
    """`cf` is what the edge knows of the caller, or None."""

    def __init__(
        self,
        input: str | Request,
        init: Mapping[str, Any] | None = None,
        *,
        method: str | None = None,
        headers: Any = None,
        body: Any = None,
        cf: Any = None,
        redirect: str | None = None,
        signal: Any = None,
    ) -> None:
        given = dict(init or {})
        method = method or given.get("method")
        body = given.get("body") if body is None else body
        headers = given.get("headers") if headers is None else headers
        source, kind = source_of(body)
        if isinstance(input, Request):
            source = input._copied() if body is None else source
            method, headers = method or input.method, headers or input.headers
            url, cf = input.url, cf or input.cf
        else:
            url = str(input)
        super().__init__(source)
        self.url: str = url
        self.method: HTTPMethod = _method(method or "GET")
        self.headers = Headers(headers)
        self.cf: Any = cf
        self.redirect = redirect or given.get("redirect") or "follow"
        self.signal = signal
        if kind is not None and "content-type" not in self.headers:
            self.headers.set("content-type", kind)
        if self._source is not None and self.method in ("GET", "HEAD"):
            raise TypeError(f"a {self.method} request has no body")

    @classmethod
    def new(cls, input: str | Request, init: Mapping[str, Any] | None = None) -> Request:
        return cls(input, init)

    def clone(self) -> Request:
        return Request(self)


class _Json:
    """`Response.json(data)` makes a response, `await response.json()` reads one."""

    def __get__(self, response: Response | None, kind: type[Response]) -> Any:
        return kind.from_json if response is None else super(Response, response).json


class Response(Body):
    json = _Json()

    def __init__(
        self,
        body: Any = None,
        status: int | HTTPStatus | Mapping[str, Any] | None = None,
        status_text: str = "",
        headers: Any = None,
        web_socket: Any = None,
        *,
        statusText: str = "",
    ) -> None:
        if web_socket is not None:
            raise TypeError("WebSockets are not supported here")
        if isinstance(status, Mapping):  # JavaScript's second argument: a table
            init = dict(status)
            status, headers = init.get("status"), init.get("headers", headers)
            status_text = init.get("statusText", status_text)
        source, kind = source_of(body)
        super().__init__(source)
        self.status = int(status or 200)
        if not 200 <= self.status <= 599 and self.status != 101:
            raise ValueError(f"a response's status is from 200 to 599, not {self.status}")
        if self.status in BODILESS and source:
            raise TypeError(f"a response with status {self.status} has no body")
        self.status_text = status_text or statusText
        self.headers = Headers(headers)
        self.url = ""
        if kind is not None and "content-type" not in self.headers:
            self.headers.set("content-type", kind)

    @classmethod
    def new(cls, body: Any = None, init: Any = None, **named: Any) -> Response:
        return cls(body, init, **named)

    @staticmethod
    def from_json(
        data: Any,
        status: int | HTTPStatus | None = None,
        status_text: str = "",
        headers: Any = None,
    ) -> Response:
        fields = Headers(headers)
        if "content-type" not in fields:
            fields.set("content-type", "application/json")
        return Response(as_json(data), status, status_text, fields)

    @staticmethod
    def redirect(url: str, status: int | HTTPStatus = HTTPStatus.FOUND) -> Response:
        if int(status) not in REDIRECTS:
            raise ValueError(f"{int(status)} is no redirect")
        if not urlsplit(str(url)).scheme:
            raise ValueError(f"a redirect goes to a whole URL, not to {url!r}")
        return Response(None, status, headers={"location": str(url)})

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def statusText(self) -> str:
        return self.status_text

    def replace_body(self, body: Any) -> Response:
        """A response with another body and the same head."""
        return Response(body, self.status, self.status_text, self.headers)

    def clone(self) -> Response:
        return Response(self._copied(), self.status, self.status_text, self.headers)


class FetchResponse(Response):
    """What `fetch` gives."""

    def __init__(self, status: int, reason: str, headers: Headers, body: ReadableStream | None):
        super().__init__(None, 200)
        self._source = None if status in BODILESS else body
        self.status, self.status_text, self.headers = status, reason, headers


def _method(given: str) -> HTTPMethod:
    try:
        return HTTPMethod(str(given).upper())
    except ValueError:
        raise TypeError(f"{given!r} is no method of HTTP that is supported here") from None
