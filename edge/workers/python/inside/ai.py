"""`env.AI`: the same calls, options and results as in JavaScript (`js/ai.js`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from .ffi import JsException
from .headers import Headers
from .messages import FetchResponse, Request, Response
from .outside import Outside, path_of
from .streams import ReadableStream
from .values import as_text, plain, wrap

KNOWN = ("gateway", "extraHeaders", "returnRawResponse", "queueRequest", "rejectIfBusy",
         "signal", "prefix", "tags", "sessionOptions")  # fmt: skip
GATEWAY = ("id", "skipCache", "cacheTtl", "cacheKey", "collectLog", "metadata")
CACHE = "store:@ai"
KEPT_BY_KEY_S = 300
LEAST_TTL_S, MOST_TTL_S = 60, 2592000
_JSON = "application/json"
_RUN = "http://edge/client/v4/accounts/worker/ai"


class Ai:
    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self.lastRequestId: str | None = None
        self.aiGatewayLogId: str | None = None

    async def run(self, model: str, inputs: Any, options: Any = None, **named: Any) -> Any:
        """The result without its envelope; a stream for `stream: true`; a Response for
        `returnRawResponse`. Raises JsException named InferenceUpstreamError, TypeError."""
        if not isinstance(model, str):
            raise TypeError("AI.run: the model is a string")
        if not isinstance(inputs, Mapping):
            raise TypeError("AI.run: the inputs are a dictionary or an object")
        given = {**(options or {}), **named}
        _refuse_unknown(given, KNOWN, "option")
        body = as_text(inputs)
        plan = _caching(given.get("gateway"))
        key = None if plan is None else plan[1] or _digest(f"{model}\n{body}")
        answer = None if key is None else await self._cached(key)
        if answer is None:
            answer = await _unwrapped(await self._ask(model, inputs, body, given))
            self.lastRequestId = answer.headers.get("x-request-id")
            if plan is not None and key is not None and answer.ok:
                answer = self._kept(key, plan[0], answer)
        if given.get("returnRawResponse"):
            return answer
        if not answer.ok:
            raise await _upstream_error(answer)
        if answer.headers.get("content-type", "").startswith(_JSON):
            return wrap(await answer.json())
        return answer.body

    async def models(self, query: Any = None) -> Any:
        request = Request(f"{_RUN}/models/search?{urlencode(plain(query or {}))}")
        answer = await self._outside.ask("edge", request)
        return wrap((await answer.json())["result"])

    def gateway(self, *_: Any) -> Any:
        raise TypeError("AI.gateway is not supported here; AI.run takes the option 'gateway'")

    def toMarkdown(self, *_: Any) -> Any:
        raise TypeError("AI.toMarkdown is not supported here")

    def autorag(self, *_: Any) -> Any:
        raise TypeError("AI.autorag is not supported here")

    async def _ask(
        self, model: str, inputs: Mapping[str, Any], body: str, options: dict[str, Any]
    ) -> FetchResponse:
        queued = options.get("queueRequest") or "request_id" in inputs
        path = quote(model, safe="/@")
        url = f"{_RUN}/run/{path}{'?queueRequest=true' if queued else ''}"
        headers = Headers()
        sessions = options.get("sessionOptions") or {}
        extra = {**(sessions.get("extraHeaders") or {}), **(options.get("extraHeaders") or {})}
        for name, value in extra.items():
            low = name.lower()
            if low != "authorization" and not low.startswith("x-skerry-"):
                headers.set(name, value)
        headers.set("content-type", _JSON)
        if options.get("rejectIfBusy"):
            headers.set("x-skerry-reject-if-busy", "1")
        request = Request(url, method="POST", headers=headers, body=body)
        return await self._outside.ask("edge", request)

    async def _cached(self, key: str) -> Response | None:
        url = f"http://store/{path_of(key)}?urlencoded=true"
        found = await self._outside.ask(CACHE, Request(url))
        if found.status != 200:
            await found.bytes()
            return None
        headers = Headers(json.loads(found.headers.get("cf-kv-metadata")))
        headers.set("cf-aig-cache-status", "HIT")
        return Response(await found.bytes(), headers=headers)

    def _kept(self, key: str, ttl: int, answer: Response) -> Response:
        """The answer, which is kept once all of it has passed and was whole."""
        kind = answer.headers.get("content-type", _JSON)
        stream = answer.body

        async def through() -> AsyncIterator[bytes]:
            pieces: list[bytes] = []
            if stream is not None:
                async for piece in stream:
                    pieces.append(piece)
                    yield piece
            whole = b"".join(pieces)
            if kind.startswith("text/event-stream") and b"data: [DONE]" not in whole[-32:]:
                return
            request = Request(
                f"http://store/{path_of(key)}?urlencoded=true&expiration_ttl={ttl}",
                method="PUT",
                body=whole,
                headers={"cf-kv-metadata": json.dumps({"content-type": kind})},
            )
            await (await self._outside.ask(CACHE, request)).bytes()

        headers = Headers(answer.headers)
        headers.set("cf-aig-cache-status", "MISS")
        return Response(ReadableStream(through()), answer.status, headers=headers)


def _refuse_unknown(given: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in known:
            raise TypeError(
                f"AI.run: the {what} {name!r} is not supported here; known: {', '.join(known)}"
            )


def _caching(gateway: Any) -> tuple[int, str | None] | None:
    """(time, key) where the answer may come from the cache."""
    if not gateway:
        return None
    _refuse_unknown(gateway, GATEWAY, "gateway option")
    ttl, key = gateway.get("cacheTtl"), gateway.get("cacheKey")
    if gateway.get("skipCache") or (ttl is None and key is None):
        return None
    ttl = KEPT_BY_KEY_S if ttl is None else ttl
    if not isinstance(ttl, int) or not LEAST_TTL_S <= ttl <= MOST_TTL_S:
        raise TypeError(
            f"AI.run: gateway.cacheTtl is a number of seconds from {LEAST_TTL_S} to {MOST_TTL_S}"
        )
    return ttl, key


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def _unwrapped(answer: FetchResponse) -> Response:
    if not answer.headers.get("content-type", "").startswith(_JSON):
        return answer
    envelope = await answer.json()
    headers = Headers(answer.headers)
    headers.delete("content-length")
    error: dict[str, Any] = next(iter(envelope.get("errors") or []), {})
    inner = envelope.get("result") if answer.ok else {
        "internalCode": error.get("code"),
        "message": error.get("message"),
        "description": error.get("message"),
        "name": "InferenceUpstreamError",
    }  # fmt: skip
    return Response(json.dumps(inner, ensure_ascii=False), answer.status, headers=headers)


async def _upstream_error(answer: Response) -> JsException:
    text = await answer.text()
    try:
        told = json.loads(text)
        return JsException(f"{told['internalCode']}: {told['description']}", told["name"])
    except (ValueError, KeyError, TypeError):
        return JsException(text, "InferenceUpstreamError")
