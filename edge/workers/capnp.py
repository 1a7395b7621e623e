"""Cap'n Proto's text form of values, as far as a configuration of workerd needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Embed:
    """The contents of a file beside the configuration."""

    path: str


@dataclass(frozen=True, slots=True)
class Word:
    """What stands for itself: a constant, true, void."""

    text: str


Value = str | bool | int | Embed | Word | Sequence["Value"] | Mapping[str, "Value"]
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def render(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Embed):
        return f"embed {quoted(value.path)}"
    if isinstance(value, Word):
        return value.text
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name} = {render(one)}' for name, one in value.items())})"
    return f"[{', '.join(render(one) for one in value)}]"


def quoted(text: str) -> str:
    """UTF-8 in quotes; everything that is not plain ASCII as its bytes."""
    parts: list[str] = []
    for char in text:
        if char in _ESCAPED:
            parts.append(_ESCAPED[char])
        elif " " <= char <= "~":
            parts.append(char)
        else:
            parts += [f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass")]
    return f'"{"".join(parts)}"'
