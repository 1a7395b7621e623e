"""Turns msgspec's complaint about a topology into one with a line and the nearest known key.

TOML readers give no positions, so the line is found by walking the text's tables and keys.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec

_WHERE = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]+)`")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]|\[(?P<any>\.\.\.)\]")
_TABLE = re.compile(r"^\s*(?P<open>\[\[?)\s*(?P<name>[^\]]+?)\s*\]\]?")
_KEY = re.compile(r"^\s*(?P<key>[A-Za-z0-9_-]+|\"[^\"]+\")\s*(=|\.)")


def explain(complaint: str, text: str, raw: dict[str, Any], root: type[msgspec.Struct]) -> str:
    """ "LINE: what is wrong (did you mean …?)" for a message of msgspec.convert."""
    where = _WHERE.search(complaint)
    what = complaint[: where.start()] if where else complaint
    path = _steps(where["path"]) if where else []
    unknown = _UNKNOWN.search(what)
    if unknown is None:
        return f"{_line(text, path)}: {_dotted(path)}{what[0].lower()}{what[1:]}"
    field = unknown["field"]
    known = _fields_at(root, path)
    near = difflib.get_close_matches(field, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
    line = _line(text, _find_unknown(raw, path, field))
    return f"{line}: {_dotted(path)}unknown key {field!r}; {hint}"


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    for step in _STEP.finditer(path):
        if step["index"] is not None:
            steps.append(int(step["index"]))
        else:
            steps.append(step["key"] or "...")
    return steps


def _dotted(path: list[str | int]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return f"{text.lstrip('.')}: " if text else ""


def _find_unknown(raw: Any, path: list[str | int], field: str) -> list[str | int]:
    """The path of `field`; a mapping's "..." step is any key under which the field stands."""
    node, found = raw, []
    for step in path:
        if step == "..." and isinstance(node, dict):
            step = next((k for k, v in node.items() if isinstance(v, dict) and field in v), "...")
        found.append(step)
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return [*found, field]
    return [*found, field]


def _fields_at(root: Any, path: list[str | int]) -> list[str]:
    kind = msgspec.inspect.type_info(root)
    for step in path:
        kind = _step_into(kind, step)
    fields = getattr(_struct(kind), "fields", ())
    return [field.encode_name for field in fields]


def _step_into(kind: Any, step: str | int) -> Any:
    if isinstance(step, int):
        return getattr(_first(kind, "item_type"), "item_type", kind)
    if step == "..." or not hasattr(_struct(kind), "fields"):
        return getattr(_first(kind, "value_type"), "value_type", kind)
    for field in _struct(kind).fields:
        if field.encode_name == step:
            return field.type
    return kind


def _struct(kind: Any) -> Any:
    return _first(kind, "fields")


def _first(kind: Any, attribute: str) -> Any:
    """`kind` itself or the member of a union that has `attribute`."""
    for member in getattr(kind, "types", (kind,)):
        if hasattr(member, attribute):
            return member
    return kind


def _line(text: str, path: list[str | int]) -> int:
    """The line of the deepest part of `path` that the text spells out; 1 when none does."""
    best, depth = 1, 0
    table: list[str | int] = []
    counts: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        head = _TABLE.match(line)
        if head:
            table = _table_path(head["name"], counts, array=head["open"] == "[[")
            here = table
        else:
            key = _KEY.match(line)
            if key is None:
                continue
            here = [*table, key["key"].strip('"')]
        if len(here) > depth and here == path[: len(here)]:
            best, depth = number, len(here)
    return best


def _table_path(
    name: str, counts: dict[tuple[str | int, ...], int], *, array: bool
) -> list[str | int]:
    parts = [a or b for a, b in re.findall(r'"([^"]+)"|([A-Za-z0-9_-]+)', name)]
    path: list[str | int] = []
    for position, part in enumerate(parts):
        path.append(part)
        spelled = tuple(path)
        if array and position == len(parts) - 1:
            counts[spelled] = counts.get(spelled, -1) + 1
        if spelled in counts:
            path.append(counts[spelled])
    return path
