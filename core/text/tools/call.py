"""One call, read while it is written: its name as soon as it is there, then its arguments."""

from __future__ import annotations

import json
from enum import Enum, auto

from core.text.tools.formats import ARGUMENT_NAMES
from core.text.tools.scan import BLANKS, ObjectScanner, Seen

MAX_NAME = 128


class State(Enum):
    OPEN = auto()
    """So far nothing says what it is."""
    NAMED = auto()
    """It has a name."""
    DONE = auto()
    BROKEN = auto()
    """Not JSON, or an object without a name."""


class CallObject:
    """`raw` is everything taken. Arguments are given out as they were written: a mapping's text
    piece by piece, text that holds a mapping whole."""

    def __init__(self) -> None:
        self.state = State.OPEN
        self.name = ""
        self.raw = ""
        self._given = False
        """Some arguments have gone out."""
        self._scan = ObjectScanner()
        self._value: list[str] = []
        self._held: str | None = None
        """Arguments that came before the name, or that are text."""
        self._streaming = False

    def take(self, char: str) -> str:
        """The arguments that may go out because of it."""
        self.raw += char
        seen = self._scan.take(char)
        if seen is Seen.BROKEN:
            self.state = State.BROKEN
            return ""
        out = ""
        if seen in (Seen.VALUE, Seen.VALUE_END):
            out = self._of_value(char)
        if seen in (Seen.VALUE_END, Seen.AFTER_VALUE, Seen.AFTER_VALUE_END):
            self._value_ended()
        if seen in (Seen.END, Seen.AFTER_VALUE_END):
            self.state = State.DONE if self.name else State.BROKEN
            out += self._rest()
        return out

    def _of_value(self, char: str) -> str:
        if not self._value and not self._given:
            self._streaming = bool(self.name) and self._is_arguments() and char == "{"
        self._value.append(char)
        if not self._streaming:
            return ""
        self._given = True
        return char

    def _value_ended(self) -> None:
        value = "".join(self._value)
        self._value.clear()
        if self._streaming:
            self._streaming = False
        elif self._scan.key == "name" and not self.name:
            self._take_name(value)
        elif self._is_arguments() and self._held is None:
            self._held = value

    def _is_arguments(self) -> bool:
        return self._scan.key in ARGUMENT_NAMES

    def _take_name(self, value: str) -> None:
        try:
            name = json.loads(value, strict=False)
        except ValueError:
            name = None
        if isinstance(name, str) and name:
            self.name, self.state = name, State.NAMED
        else:
            self.state = State.BROKEN

    def _rest(self) -> str:
        """What a complete object has not given yet."""
        if self.state is not State.DONE or self._given:
            return ""
        self._given = True
        if self._held is None or self._held == "null":
            return "{}"
        return _mapping(self._held)


class NamedCall:
    """A call whose name stands before its arguments, with `between` between them; like a
    `CallObject` else. It has a name once an object has begun behind it."""

    def __init__(self, between: str) -> None:
        self.state = State.OPEN
        self.name = ""
        self.raw = ""
        self._between = between
        self._scan = ObjectScanner()
        self._read = ""
        """The name, as soon as it was read."""

    def take(self, char: str) -> str:
        """The arguments that may go out because of it."""
        self.raw += char
        if not self._read:
            self._of_name()
            return ""
        seen = self._scan.take(char)
        if seen is Seen.BROKEN:
            self.state = State.BROKEN
            return ""
        if not self.name and char in BLANKS:
            return ""
        self.name, self.state = self._read, State.NAMED
        if seen in (Seen.END, Seen.AFTER_VALUE_END):
            self.state = State.DONE
        return char

    def _of_name(self) -> None:
        if self.raw.endswith(self._between):
            self._read = self.raw.removesuffix(self._between).strip(BLANKS)
            self.state = State.OPEN if self._read else State.BROKEN
        elif len(self.raw) > MAX_NAME + len(self._between):
            self.state = State.BROKEN


def _mapping(value: str) -> str:
    """Arguments that were written as text, as what the text says."""
    try:
        inner = json.loads(value, strict=False)
        if isinstance(inner, str) and isinstance(json.loads(inner), dict):
            return inner
    except ValueError:
        return value
    return value
