"""The command line as a client: one streamed chat completion over HTTP, measured from outside.

Speaks OpenAI's dialect like any other client, and reads what Skerry adds to it: response headers
and the comment line `: skerry {…}` before the end of the stream. `SseReader` and `AnswerBuilder`
are machines without I/O; `ask` feeds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from core.errors import ConfigError
from deploy.calling import tls_reason

JSON_HEADERS = {"content-type": "application/json"}
TIMEOUT = httpx.Timeout(600.0, connect=5.0)


class AskFailed(ConfigError):
    """The request got no whole answer; the message says what the other side said."""


class Turn(msgspec.Struct, frozen=True):
    role: str
    content: str


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request went and where its time went: what an edge tells when it may."""

    edge: str = ""
    region: str = ""
    prefill: str | None = None
    decode: str | None = None
    reason: str = ""
    node_reason: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    transfer_s: float = 0.0
    kv_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `first_s` and `total_s` count from the moment of sending."""

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_s: float
    total_s: float
    trace: Trace

    @property
    def tokens_per_s(self) -> float:
        """After the first token; 0 for an answer of one token."""
        spent = self.total_s - self.first_s
        return (self.completion_tokens - 1) / spent if spent > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Data:
    text: str


@dataclass(frozen=True, slots=True)
class Comment:
    text: str


class SseReader:
    """Lines of an event stream → what they say. Event names and ids are not used here."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def line(self, line: str) -> Data | Comment | None:
        """One line without its end."""
        if line == "":
            text, self._data = "\n".join(self._data), []
            return Data(text) if text else None
        if line.startswith(":"):
            return Comment(line[1:].strip())
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Problem(msgspec.Struct):
    message: str = "no message"
    code: str | int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Problem | None = None


class AnswerBuilder:
    """Folds a stream into an `Answer`. Times are given, not read."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._first: float | None = None
        self._texts: list[str] = []
        self._finish = ""
        self._usage = _Usage()
        self._trace = Trace()
        self.ended = False

    def take(self, event: Data | Comment, now: float) -> str:
        """The piece of answer that `event` brings. Raises AskFailed for an error event."""
        if isinstance(event, Comment):
            kind, _, body = event.text.partition(" ")
            if kind == "skerry":
                self._trace = msgspec.json.decode(body, type=Trace)
            return ""
        if event.text == "[DONE]":
            self.ended = True
            return ""
        chunk = msgspec.json.decode(event.text, type=_Chunk)
        if chunk.error is not None:
            raise AskFailed(f"the answer broke off: {chunk.error.message}")
        self._usage = chunk.usage or self._usage
        piece = "".join(choice.delta.content or "" for choice in chunk.choices)
        if piece and self._first is None:
            self._first = now
        self._texts.append(piece)
        self._finish = next(
            (c.finish_reason for c in chunk.choices if c.finish_reason), self._finish
        )
        return piece

    @property
    def begun(self) -> bool:
        """Something of the answer has come."""
        return self._first is not None

    def answer(self, now: float) -> Answer:
        """Raises AskFailed when the stream stopped before its end."""
        if not self.ended:
            raise AskFailed("the answer broke off without an end")
        details = self._usage.prompt_tokens_details or _Details()
        return Answer(
            text="".join(self._texts),
            finish=self._finish,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=details.cached_tokens,
            completion_tokens=self._usage.completion_tokens,
            first_s=(now if self._first is None else self._first) - self._sent,
            total_s=now - self._sent,
            trace=self._trace,
        )


def ask(
    client: httpx.Client,
    base: str,
    *,
    model: str,
    turns: Sequence[Turn],
    show: Callable[[str], None],
    wait: Callable[[str], None] = lambda _: None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    stop: Sequence[str] = (),
) -> Answer:
    """Stream one answer from the edge at `base`; `show` gets each piece, and `wait` what is waited
    for before the first one. Raises AskFailed."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if temperature is not None:
        body["temperature"] = temperature
    if stop:
        body["stop"] = list(stop)
    url = f"{base.rstrip('/')}/v1/chat/completions"
    try:
        content = msgspec.json.encode(body)
    except UnicodeEncodeError as error:  # Python's way to keep what it could not decode
        raise AskFailed("what was asked is not UTF-8 text") from error
    builder = AnswerBuilder(time.monotonic())
    try:
        with client.stream(
            "POST", url, content=content, headers=JSON_HEADERS, timeout=TIMEOUT
        ) as response:
            if not response.is_success:
                response.read()
                raise AskFailed(refusal(response))
            for event in _events(response):
                piece = builder.take(event, time.monotonic())
                if piece:
                    show(piece)
                elif not builder.begun and (why := waits_for(event)) is not None:
                    wait(why)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskFailed(unreachable(base, error)) from error
    except msgspec.MsgspecError as error:
        raise AskFailed(f"{base} does not answer in OpenAI's form: {error}") from error
    return builder.answer(time.monotonic())


def waits_for(event: Data | Comment) -> str | None:
    """What an edge says of a request that has no answer yet, for people; None where it says nothing
    of that."""
    if not isinstance(event, Comment):
        return None
    kind, _, place = event.text.partition(", ")
    if kind == "held" and place:
        return f"every region is busy: {place} in the edge's line"
    if event.text == "waiting":
        return (
            "no word of an answer yet: it waits in its region, its prompt is read, or its model "
            "starts"
        )
    return None


def refusal(response: httpx.Response) -> str:
    """What a refused request was told, in one line."""
    try:
        problem = msgspec.json.decode(response.content, type=_Chunk).error or _Problem()
    except msgspec.MsgspecError:
        problem = _Problem(response.text[:200].replace("\n", " ") or response.reason_phrase)
    return f"refused ({response.status_code}): {problem.message}"


def unreachable(base: str, error: Exception) -> str:
    if (why := tls_reason(error)) is not None:
        return f"{base}: {why}"
    if isinstance(error, httpx.ConnectError):
        return f"nothing answers at {base}; start a world with `make up`, or name one with --edge"
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return f"{base!r} is not a URL like http://127.0.0.1:8787"
    return f"{base}: {str(error) or type(error).__name__}"


def _events(response: httpx.Response) -> Iterator[Data | Comment]:
    reader = SseReader()
    for line in response.iter_lines():
        event = reader.line(line)
        if event is not None:
            yield event
