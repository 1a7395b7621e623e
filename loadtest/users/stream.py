"""One streamed answer of an OpenAI-compatible server, read as cheaply as Python allows: events are
looked at as bytes, and only those that carry usage or an error are parsed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

import msgspec
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPSocketPoolResponse

from loadtest.users.answers import Answer

END = b"data: [DONE]"
_CONTENT = (b'"content":"', b'"text":"', b'"tool_calls":[', b'"response":"')
_EMPTY = (b'"content":""', b'"text":""')
_TRACE = b": skerry "
"""A comment of ours that tells where a request went, and no sign of waiting."""


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Said(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None
    error: _Said | None = None


class _Whole(msgspec.Struct):
    """A refusal, in OpenAI's form or in Cloudflare's."""

    error: _Said | None = None


_event = msgspec.json.Decoder(_Event)
_whole = msgspec.json.Decoder(_Whole)


class Asker:
    """A client of one edge; `began` is the test's start (perf_counter)."""

    def __init__(self, edge: str, key: str | None, *, began: float, timeout_s: float = 120.0):
        self.edge = edge
        self._began = began
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._http = HTTPClient.from_url(
            edge,
            concurrency=1,
            connection_timeout=10.0,
            network_timeout=timeout_s,
            ssl_options=_authorities(),
        )

    def close(self) -> None:
        self._http.close()

    def ask(self, kind: str, path: str, body: Mapping[str, Any], due: float) -> tuple[Answer, str]:
        """The answer's figures and its text. Never raises for what a server may do."""
        reading = _Reading()
        error, region, retry_after = "", "", None
        try:
            response = self._http.request(
                "POST", path, body=msgspec.json.encode(body), headers=self._headers
            )
            region = str(response.get("x-skerry-region") or "")
            retry_after = response.get("retry-after")
            good = response.status_code == 200
            error = reading.read(response) if good else _refusal(response)
            response.release()
        except (OSError, HTTPException, msgspec.MsgspecError) as failure:
            error = "cut" if reading.pieces else type(failure).__name__
        now = time.perf_counter()
        usage = reading.usage or _Usage()
        details = usage.prompt_tokens_details or _Details()
        tokens = usage.completion_tokens or reading.pieces
        spent_s = reading.last - reading.first
        return (
            Answer(
                kind=kind,
                edge=self.edge,
                region=region,
                error=error,
                at_s=due - self._began,
                ttft_s=reading.first - due if reading.pieces else None,
                per_token_s=spent_s / (tokens - 1) if tokens > 1 and reading.pieces > 1 else None,
                total_s=now - due,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=details.cached_tokens,
                completion_tokens=tokens,
                retry_after_s=None if retry_after is None else float(retry_after),
                comments=reading.comments,
            ),
            b"".join(reading.text).decode("utf-8", "replace"),
        )


def _authorities() -> dict[str, str]:
    """Of an edge that speaks https: the usual ones, or those that SSL_CERT_FILE names."""
    named = os.environ.get("SSL_CERT_FILE")
    return {"ca_certs": named} if named else {}


class _Reading:
    """The events of one stream. `text` is kept as it stood in the JSON, escapes included: it only
    has to make the next turn's prompt grow as a real one does."""

    def __init__(self) -> None:
        self.pieces = self.comments = 0
        self.first = self.last = 0.0
        self.usage: _Usage | None = None
        self.text: list[bytes] = []

    def read(self, response: HTTPSocketPoolResponse) -> str:
        """Empty, or what went wrong."""
        while True:
            event = bytes(response.readline(b"\n\n"))
            if not event:
                return "cut"
            if event.startswith(END):
                return ""
            if event.startswith(b":"):
                self.comments += not self.pieces and not event.startswith(_TRACE)
                continue
            if self._piece(event):
                continue
            if b'"error"' in event or b'"usage":{' in event:
                told = _event.decode(event.removeprefix(b"data: "))
                if told.error is not None:
                    return told.error.code or "error"
                self.usage = told.usage or self.usage

    def _piece(self, event: bytes) -> bool:
        for mark in _CONTENT:
            start = event.find(mark)
            if start < 0 or any(empty in event for empty in _EMPTY):
                continue
            self.last = time.perf_counter()
            if not self.pieces:
                self.first = self.last
            self.pieces += 1
            end = event.find(b'"', start + len(mark))
            self.text.append(event[start + len(mark) : end])
            return b'"usage":{' not in event
        return False


def _refusal(response: HTTPSocketPoolResponse) -> str:
    try:
        told = _whole.decode(bytes(response.read()))
    except msgspec.MsgspecError:
        return str(response.status_code)
    code = told.error.code if told.error is not None else None
    return f"{response.status_code} {code}" if code else str(response.status_code)
