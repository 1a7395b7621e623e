"""The module `js`: the few globals of JavaScript that Python Workers use."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from . import console
from .api import fetch
from .body import Blob, File, FormData
from .headers import Headers
from .messages import Request, Response
from .streams import ReadableStream, TransformStream, WritableStream
from .values import JsArray, JsObject, as_text, from_entries, wrap

__all__ = [
    "JSON", "URL", "Array", "Blob", "Date", "File", "FormData", "Headers", "Math", "Object",
    "ReadableStream", "Request", "Response", "TextDecoder", "TextEncoder", "TransformStream",
    "URLSearchParams", "Uint8Array", "WritableStream", "clearTimeout", "console", "crypto", "fetch",
    "setTimeout",
]  # fmt: skip


class Object:
    @staticmethod
    def new() -> JsObject:
        return JsObject()

    fromEntries = staticmethod(from_entries)

    @staticmethod
    def entries(value: Mapping[str, Any]) -> JsArray:
        return JsObject(value).object_entries()

    @staticmethod
    def keys(value: Mapping[str, Any]) -> JsArray:
        return JsObject(value).object_keys()

    @staticmethod
    def values(value: Mapping[str, Any]) -> JsArray:
        return JsObject(value).object_values()

    @staticmethod
    def assign(target: JsObject, *sources: Mapping[str, Any]) -> JsObject:
        for source in sources:
            target.update(source)
        return target


class Array:
    @staticmethod
    def new(*items: Any) -> JsArray:
        return JsArray(items)

    @staticmethod
    def isArray(value: Any) -> bool:
        return isinstance(value, list)


class _Json:
    def stringify(self, value: Any, *_: Any) -> str:
        return as_text(value)

    def parse(self, text: str) -> Any:
        return wrap(json.loads(text))


class TextEncoder:
    @classmethod
    def new(cls) -> TextEncoder:
        return cls()

    def encode(self, text: str = "") -> bytes:
        return text.encode()


class TextDecoder:
    @classmethod
    def new(cls, *_: Any) -> TextDecoder:
        return cls()

    def decode(self, data: bytes = b"", *_: Any) -> str:
        return bytes(data).decode("utf-8", "replace")


class Uint8Array:
    @staticmethod
    def new(data: Iterable[int] | int) -> bytes:
        return bytes(data)


class URLSearchParams:
    def __init__(self, init: Any = "") -> None:
        if isinstance(init, str):
            init = parse_qsl(init.removeprefix("?"), keep_blank_values=True)
        pairs = init.items() if isinstance(init, Mapping) else init
        self._pairs = [(str(k), str(v)) for k, v in pairs]

    @classmethod
    def new(cls, init: Any = "") -> URLSearchParams:
        return cls(init)

    def get(self, name: str) -> str | None:
        return next((value for key, value in self._pairs if key == name), None)

    def getAll(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def has(self, name: str) -> bool:
        return any(key == name for key, _ in self._pairs)

    def append(self, name: str, value: Any) -> None:
        self._pairs.append((name, str(value)))

    def toString(self) -> str:
        return urlencode(self._pairs)

    __str__ = toString


class URL:
    def __init__(self, url: str, base: str | None = None) -> None:
        self.href = urljoin(base, url) if base else str(url)
        parts = urlsplit(self.href)
        if not parts.scheme or not parts.netloc:
            raise TypeError(f"Invalid URL: {url!r}")
        self.protocol, self.host = f"{parts.scheme}:", parts.netloc.rpartition("@")[2]
        self.hostname, self.port = parts.hostname or "", str(parts.port or "")
        self.origin = f"{parts.scheme}://{self.host}"
        self.pathname = parts.path or "/"
        self.search = f"?{parts.query}" if parts.query else ""
        self.hash = f"#{parts.fragment}" if parts.fragment else ""
        self.searchParams = URLSearchParams(parts.query)

    @classmethod
    def new(cls, url: str, base: str | None = None) -> URL:
        return cls(url, base)

    def toString(self) -> str:
        return self.href

    __str__ = toString


class Date:
    @staticmethod
    def now() -> int:
        return int(time.time() * 1000)


def setTimeout(function: Callable[..., Any], milliseconds: float = 0, *given: Any) -> Any:
    return asyncio.get_running_loop().call_later(milliseconds / 1000, function, *given)


def clearTimeout(timer: Any) -> None:
    if timer is not None:
        timer.cancel()


JSON = _Json()
Math = SimpleNamespace(random=lambda: uuid.uuid4().int / 2**128)
crypto = SimpleNamespace(randomUUID=lambda: str(uuid.uuid4()))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"js.{name} is not supported here; there are: {', '.join(__all__)}")
