"""One-line logs on stderr: time, level, process, logger, then the message as `event key=value …`;
or the same as JSON, for what reads logs.

Never a prompt, an answer or a secret: messages name request ids, places, counts and durations.
Nor does a process leave a core file when it crashes: its memory holds all of those.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
import time
import traceback
from typing import Literal, TextIO

import msgspec

Form = Literal["text", "json"]

_QUIET = ("aiohttp.access", "asyncio", "grpc", "httpcore", "httpx", "uvicorn")
"""Libraries whose INFO lines say nothing that ours do not."""


_FIELD = re.compile(r"(?:^| )([a-z][a-z0-9_]*)=(\S+)")
_NUMBER = re.compile(r"-?[0-9]{1,15}")
"""What every reader of JSON takes as it is."""


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO edge/ams skerry.gateway served id=… status=200`.

    A record is one line whatever it holds: line breaks are written as `\\n`. Of an exception it
    holds the kind and the places, not the message, which may quote a prompt.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = _said(record).replace("\r", "\\r").replace("\n", "\\n")
        return f"{_stamp(record)} {record.levelname} {self._process} {record.name} {line}"


class JsonFormatter(logging.Formatter):
    """An object a line: `time`, `level`, `process`, `logger`, the whole `message`, and what it says
    as `key=value`, numbers as such. A key of those five is in the message alone."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        # JSON is UTF-8, and a path need not be: what is not is written as the stream writes it.
        text = _said(record).encode("utf-8", "backslashreplace").decode()
        told: dict[str, str | int] = {
            key: int(value) if _NUMBER.fullmatch(value) else value
            for key, value in _FIELD.findall(text)
        }
        told |= {
            "time": _stamp(record),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": text,
        }
        return msgspec.json.encode(told).decode()


def _stamp(record: logging.LogRecord) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{stamp}.{int(record.msecs):03d}Z"


def _said(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        text += " " + _traced(record.exc_info[1])
    return text


def _traced(error: BaseException) -> str:
    """`ValueError at INNERMOST:7 < OUTER:30 from KeyError at …`."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    text = f"{type(error).__name__} at {places or '?'}"
    if isinstance(error, BaseExceptionGroup):
        text += f" of ({'; '.join(_traced(one) for one in error.exceptions)})"
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if before is None else f"{text} from {_traced(before)}"


def setup(
    process: str, level: str = "INFO", *, form: Form = "text", stream: TextIO | None = None
) -> None:
    """Send every logger of this process to `stream` (stderr) and forbid core files; called once, by
    the entry point.

    `process` says who speaks: "edge/ams", "router/eu", "node/eu-decode-1".
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
