"""Bodies of requests and responses, and forms."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any
from urllib.parse import parse_qsl, urlencode

from .headers import Headers
from .streams import ReadableStream, as_bytes
from .values import JsArray, JsObject, as_text

Bytes = bytes
Source = bytes | ReadableStream | None
MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"


class Blob:
    def __init__(self, data: bytes = b"", content_type: str = "") -> None:
        self._data, self.type, self.size = bytes(data), content_type, len(data)

    async def bytes(self) -> bytes:
        return self._data

    async def text(self) -> str:
        return self._data.decode("utf-8", "replace")


class File(Blob):
    def __init__(self, data: bytes = b"", filename: str = "", content_type: str = "") -> None:
        super().__init__(data, content_type)
        self.name = filename


class FormData:
    """Fields in order; a value is text or a File."""

    def __init__(self, form: dict[str, Any] | None = None) -> None:
        self._fields: list[tuple[str, Any]] = list((form or {}).items())

    def append(self, name: str, value: Any) -> None:
        self._fields.append((name, value))

    def get(self, name: str) -> Any:
        return next((value for key, value in self._fields if key == name), None)

    def get_all(self, name: str) -> list[Any]:
        return [value for key, value in self._fields if key == name]

    getAll = get_all

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self._fields)

    def keys(self) -> list[str]:
        return list(dict.fromkeys(key for key, _ in self._fields))

    def items(self) -> list[tuple[str, Any]]:
        return list(self._fields)

    def urlencoded(self) -> bytes:
        return urlencode([(name, str(value)) for name, value in self._fields]).encode()


class Body:
    """`source` is bytes, a stream, or None where there is no body."""

    headers: Headers

    def __init__(self, source: Source) -> None:
        self._source = source
        self.body_used = False

    @property
    def bodyUsed(self) -> bool:
        return self.body_used

    @property
    def body(self) -> ReadableStream | None:
        """To be read once."""
        if self._source is None:
            return None
        if isinstance(self._source, bytes):
            self._source = ReadableStream(_one(self._source))
        self.body_used = True
        return self._source

    async def bytes(self) -> Bytes:
        """Raises OSError the second time."""
        if self.body_used:
            raise OSError("the body was read already")
        self.body_used = self._source is not None
        if self._source is None or isinstance(self._source, bytes):
            return self._source or b""
        return b"".join([piece async for piece in self._source])

    async def buffer(self) -> Bytes:
        return await self.bytes()

    async def arrayBuffer(self) -> Bytes:
        return await self.bytes()

    async def text(self) -> str:
        return (await self.bytes()).decode("utf-8", "replace")

    async def json(self) -> Any:
        """Raises json.JSONDecodeError."""
        return json.loads(await self.bytes())

    async def blob(self) -> Blob:
        return Blob(await self.bytes(), self.headers.get("content-type", ""))

    async def form_data(self) -> FormData:
        """Raises TypeError for a body that is no form."""
        kind: str = self.headers.get("content-type", "")
        data = await self.bytes()
        if kind.startswith(URLENCODED):
            form = FormData()
            for name, value in parse_qsl(data.decode("utf-8", "replace"), keep_blank_values=True):
                form.append(name, value)
            return form
        if kind.startswith(MULTIPART):
            return _multipart(kind, data)
        raise TypeError(f"a form was asked for, and the body is {kind or 'of no stated type'!r}")

    formData = form_data

    def _copied(self) -> Source:
        """For a clone. A stream can be read once only."""
        if self.body_used or isinstance(self._source, ReadableStream):
            raise OSError("a body that is read, or that streams, cannot be cloned; read it first")
        return self._source


def source_of(body: Any) -> tuple[Source, str | None]:
    """What a caller gives as a body, and its media type where it has one. Raises TypeError."""
    if body is None:
        return None, None
    if isinstance(body, str):
        return body.encode(), "text/plain;charset=UTF-8"
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), None
    if isinstance(body, FormData):
        return body.urlencoded(), URLENCODED
    if isinstance(body, Blob):
        return body._data, body.type or None
    if isinstance(body, ReadableStream):
        return body, None
    if isinstance(body, AsyncIterable):
        return ReadableStream(body), None
    hint = ""
    if isinstance(body, dict | list | JsObject | JsArray):
        hint = "; for JSON there is Response.from_json(…)"
    raise TypeError(f"a body cannot be a {type(body).__name__}{hint}")


def as_json(data: Any) -> bytes:
    return as_text(data).encode()


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield as_bytes(data)


def _multipart(kind: str, data: bytes) -> FormData:
    message = BytesParser(policy=HTTP).parsebytes(f"content-type: {kind}\r\n\r\n".encode() + data)
    form = FormData()
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        body = part.get_payload(decode=True)
        content = body if isinstance(body, bytes) else b""
        filename = part.get_filename()
        if filename is None:
            form.append(str(name), content.decode("utf-8", "replace"))
        else:
            form.append(str(name), File(content, filename, part.get_content_type()))
    return form
