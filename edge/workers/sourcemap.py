"""From a place in a bundle to the place in its source: a reader of source maps, revision 3."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

_DIGITS = {
    char: value
    for value, char in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}


class _Map(msgspec.Struct):
    sources: list[str]
    mappings: str


@dataclass(frozen=True, slots=True)
class Place:
    """Line and column count from 1."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


class SourceMap:
    def __init__(self, text: bytes) -> None:
        """Raises msgspec.MsgspecError for what is no source map, ValueError for broken mappings."""
        raw = msgspec.json.decode(text, type=_Map)
        self._sources = raw.sources
        self._lines = list(_lines(raw.mappings))

    def find(self, line: int, column: int) -> Place | None:
        """The source of a place, which counts from 1; None where nothing is known of it."""
        if not 0 < line <= len(self._lines):
            return None
        segments = self._lines[line - 1]
        at = bisect.bisect_right(segments, column - 1, key=lambda segment: segment[0]) - 1
        if at < 0:
            return None
        _, source, source_line, source_column = segments[at]
        if not 0 <= source < len(self._sources):
            return None
        return Place(self._sources[source], source_line + 1, source_column + 1)


def _lines(mappings: str) -> Iterator[list[tuple[int, int, int, int]]]:
    """(column, source, line, column there) for each segment that has a source."""
    source = line = column = 0
    for text in mappings.split(";"):
        here, segments = 0, []
        for segment in filter(None, text.split(",")):
            numbers = list(_numbers(segment))
            here += numbers[0]
            if len(numbers) >= 4:
                source += numbers[1]
                line += numbers[2]
                column += numbers[3]
                segments.append((here, source, line, column))
        yield segments


def _numbers(segment: str) -> Iterator[int]:
    value = shift = 0
    for char in segment:
        if char not in _DIGITS:
            raise ValueError(f"{char!r} is no digit of a source map")
        digit = _DIGITS[char]
        value |= (digit & 31) << shift
        if digit & 32:
            shift += 5
            continue
        yield -(value >> 1) if value & 1 else value >> 1
        value = shift = 0
