"""What `env` holds besides texts: the model, namespaces of keys, other Workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from .messages import FetchResponse, Request
from .outside import Outside, path_of
from .values import JsArray, JsObject, plain, wrap

METADATA = "cf-kv-metadata"
_TYPES = ("text", "json", "arrayBuffer", "stream")


class Namespace:
    """A KV namespace. A missing key is None."""

    def __init__(self, outside: Outside, binding: str) -> None:
        self._outside = outside
        self._to = f"store:{binding}"

    async def get(self, key: str | list[str], options: Any = None, **named: Any) -> Any:
        given = {"type": options} if isinstance(options, str) else {**(options or {}), **named}
        if isinstance(key, list | tuple):
            return await self._bulk(list(key), given.get("type") or "text")
        return (await self._pair(key, given))[0]

    async def getWithMetadata(self, key: str, options: Any = None, **named: Any) -> JsObject:
        given = {"type": options} if isinstance(options, str) else {**(options or {}), **named}
        value, metadata = await self._pair(key, given)
        return JsObject(value=value, metadata=wrap(metadata), cacheStatus=None)

    async def put(self, key: str, value: Any, options: Any = None, **named: Any) -> None:
        given = {**(options or {}), **named}
        query = {"urlencoded": "true"}
        for ours, theirs in (("expirationTtl", "expiration_ttl"), ("expiration", "expiration")):
            if given.get(ours) is not None:
                query[theirs] = str(int(given[ours]))
        headers = {}
        if given.get("metadata") is not None:
            headers[METADATA] = json.dumps(plain(given["metadata"]))
        answer = await self._ask("PUT", key, query, body=value, headers=headers)
        await answer.bytes()

    async def delete(self, key: str) -> None:
        await (await self._ask("DELETE", key, {"urlencoded": "true"})).bytes()

    async def list(self, options: Any = None, **named: Any) -> JsObject:
        given = {**(options or {}), **named}
        query = {}
        for ours, theirs in (("prefix", "prefix"), ("cursor", "cursor")):
            if given.get(ours):
                query[theirs] = str(given[ours])
        if given.get("limit") is not None:
            query["key_count_limit"] = str(int(given["limit"]))
        told = json.loads(await (await self._ask("GET", "", query)).bytes())
        keys = []
        for one in told["keys"]:
            if "metadata" in one:
                one["metadata"] = json.loads(one["metadata"])
            keys.append(JsObject(wrap(one)))
        return JsObject(
            keys=JsArray(keys),
            list_complete=told["list_complete"],
            cursor=told.get("cursor") or None,
            cacheStatus=None,
        )

    async def _pair(self, key: str, options: dict[str, Any]) -> tuple[Any, Any]:
        kind = options.get("type") or "text"
        if kind not in _TYPES:
            raise TypeError(f"KV.get: the type {kind!r} is none of {', '.join(_TYPES)}")
        answer = await self._ask("GET", key, {"urlencoded": "true"}, missing=True)
        if answer.status == 404:
            await answer.bytes()
            return None, None
        text = answer.headers.get(METADATA)
        metadata = None if text is None else json.loads(text)
        if kind == "stream":
            return answer.body, metadata
        value = await answer.bytes()
        if kind == "arrayBuffer":
            return value, metadata
        return (wrap(json.loads(value)) if kind == "json" else value.decode("utf-8", "replace"),
                metadata)  # fmt: skip

    async def _bulk(self, keys: Sequence[str], kind: str) -> JsObject:
        asked = {"keys": keys, "type": kind}
        request = Request("http://store/bulk/get", method="POST", body=json.dumps(asked))
        answer = await self._outside.ask(self._to, request)
        if not answer.ok:
            raise OSError(f"KV get failed: {answer.status} {answer.status_text}")
        return JsObject(wrap(json.loads(await answer.bytes())))

    async def _ask(
        self,
        method: str,
        key: str,
        query: dict[str, str],
        *,
        body: Any = None,
        headers: Any = None,
        missing: bool = False,
    ) -> FetchResponse:
        url = f"http://store/{path_of(str(key))}?{urlencode(query)}"
        request = Request(url, method=method, body=body, headers=headers)
        answer = await self._outside.ask(self._to, request)
        if not answer.ok and not (missing and answer.status == 404):
            raise OSError(f"KV {method} failed: {answer.status} {answer.status_text}")
        return answer


class Fetcher:
    """Another Worker, or the static files."""

    def __init__(self, outside: Outside, binding: str) -> None:
        self._outside = outside
        self._binding = binding

    async def fetch(self, input: str | Request, init: Any = None, **named: Any) -> FetchResponse:
        return await self._outside.ask(f"worker:{self._binding}", Request(input, init, **named))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"env.{self._binding}.{name}: calls of methods between Workers are not supported here;"
            f" use env.{self._binding}.fetch(request)"
        )
