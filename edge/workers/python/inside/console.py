"""What a Worker says: lines of JSON on the standard output, which its host reads."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, TextIO

LINE_BYTES = 60_000
"""Of one message: more is cut by its reader anyway."""
_OUT = 1


def say(level: str, message: str) -> None:
    line = json.dumps({"level": level, "message": message[:LINE_BYTES]})
    data = line.encode("ascii") + b"\n"
    while data:
        data = data[os.write(_OUT, data) :]


def log(*values: Any) -> None:
    say("log", _joined(values))


def info(*values: Any) -> None:
    say("info", _joined(values))


def debug(*values: Any) -> None:
    say("debug", _joined(values))


def warn(*values: Any) -> None:
    say("warn", _joined(values))


def error(*values: Any) -> None:
    say("error", _joined(values))


class Speaker:
    """A standard stream: whole lines are said, the rest waits."""

    encoding = "utf-8"
    errors = "replace"
    closed = False

    def __init__(self, level: str) -> None:
        self._level = level
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            say(self._level, "\n".join(lines))
        if len(self._rest) > LINE_BYTES:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self._rest:
            say(self._level, self._rest)
            self._rest = ""

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def take_over() -> None:
    """`print` and `logging` go the same way."""
    sys.stdout = _stream("log")
    sys.stderr = _stream("error")


def stack_of(error: BaseException, root: str) -> str:
    """What it says, and where."""
    head = "".join(traceback.format_exception_only(error)).rstrip()
    return f"{head}\n{places_of(error, root)}".rstrip()


def places_of(error: BaseException, root: str) -> str:
    """From the Worker's own code on, with paths as its author knows them."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if one.filename.startswith(root)]
    return "".join(traceback.format_list(own)).replace(f'"{root}/', '"').rstrip()


def _joined(values: tuple[Any, ...]) -> str:
    return " ".join(value if isinstance(value, str) else repr(value) for value in values)


def _stream(level: str) -> TextIO:
    speaker: Any = Speaker(level)
    stream: TextIO = speaker
    return stream
