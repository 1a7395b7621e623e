"""One JSON object, a character at a time: which member a character belongs to. No values are kept
but the keys. It follows nesting and strings, and leaves it to others whether values are JSON."""

from __future__ import annotations

import json
from enum import Enum, auto

BLANKS = " \t\r\n"


class Seen(Enum):
    """What a character was."""

    NOTHING = auto()
    """Between the parts."""
    VALUE = auto()
    """Of the value of member `key`."""
    VALUE_END = auto()
    """The last character of that value."""
    AFTER_VALUE = auto()
    """The one after a value that has no end of its own, a number or a word."""
    END = auto()
    """The object's closing brace."""
    AFTER_VALUE_END = auto()
    """Both of the last two."""
    BROKEN = auto()
    """Not JSON any more."""


class _Want(Enum):
    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    IN_WORD = auto()
    COMMA = auto()
    OVER = auto()


class ObjectScanner:
    """`key`: the member that is being read, or was read last."""

    def __init__(self) -> None:
        self.key = ""
        self._want = _Want.OBJECT
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._raw_key: list[str] = []

    def take(self, char: str) -> Seen:
        match self._want:
            case _Want.IN_VALUE:
                return self._in_value(char)
            case _Want.IN_KEY:
                return self._in_key(char)
            case _Want.IN_WORD:
                return self._in_word(char)
            case _Want.OVER:
                return Seen.BROKEN
        if char in BLANKS:
            return Seen.NOTHING
        return self._between(char)

    def _between(self, char: str) -> Seen:
        match self._want, char:
            case _Want.OBJECT, "{":
                self._want = _Want.FIRST_KEY
            case ((_Want.FIRST_KEY | _Want.KEY), '"'):
                self._want, self._raw_key = _Want.IN_KEY, ['"']
            case _Want.COLON, ":":
                self._want = _Want.VALUE
            case _Want.COMMA, ",":
                self._want = _Want.KEY
            case ((_Want.FIRST_KEY | _Want.COMMA), "}"):
                self._want = _Want.OVER
                return Seen.END
            case _Want.VALUE, _ if char not in ",:}]":
                return self._begin_value(char)
            case _:
                self._want = _Want.OVER
                return Seen.BROKEN
        return Seen.NOTHING

    def _begin_value(self, char: str) -> Seen:
        self._want = _Want.IN_VALUE if char in '"{[' else _Want.IN_WORD
        self._in_string = char == '"'
        self._depth = int(char in "{[")
        return Seen.VALUE

    def _in_value(self, char: str) -> Seen:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            closed = not self._in_string and not self._depth
        else:
            self._in_string = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            closed = not self._depth and not self._in_string
        if closed:
            self._want = _Want.COMMA
        return Seen.VALUE_END if closed else Seen.VALUE

    def _in_key(self, char: str) -> Seen:
        self._raw_key.append(char)
        if char == '"' and not self._escaped:
            self._want = _Want.COLON
            try:
                self.key = str(json.loads("".join(self._raw_key), strict=False))
            except ValueError:
                return Seen.BROKEN
        self._escaped = char == "\\" and not self._escaped
        return Seen.NOTHING

    def _in_word(self, char: str) -> Seen:
        if char == ",":
            self._want = _Want.KEY
        elif char == "}":
            self._want = _Want.OVER
            return Seen.AFTER_VALUE_END
        elif char in BLANKS:
            self._want = _Want.COMMA
        else:
            return Seen.VALUE
        return Seen.AFTER_VALUE
