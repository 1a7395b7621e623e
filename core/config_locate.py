"""Turns msgspec's complaint about a topology into one with a line and the nearest known key.

TOML readers give no positions, so the line is found by walking the text's tables and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from core.nearest import did_you_mean

Step = str | int
Path = tuple[Step, ...]
"""Keys and places in arrays, from the root of a topology."""

_WHERE = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]+)`")
_CHOICE = re.compile(r"^Invalid enum value '?(?P<given>.*?)'?$")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]|\[(?P<any>\.\.\.)\]")
_TABLE = re.compile(r"^\s*(?P<open>\[\[?)\s*(?P<name>[^\]]+?)\s*\]\]?")
_KEY = re.compile(r"^\s*(?P<key>[A-Za-z0-9_-]+|\"[^\"]+\")\s*(=|\.)")


def explain(complaint: str, text: str, raw: dict[str, Any], root: type[msgspec.Struct]) -> str:
    """ "LINE: what is wrong (did you mean …?)" for a message of msgspec.convert."""
    where = _WHERE.search(complaint)
    what = complaint[: where.start()] if where else complaint
    path = _spelled(_steps(where["path"]) if where else (), complaint, raw, root)
    unknown, choice = _UNKNOWN.search(what), _CHOICE.search(what)
    if unknown is not None:
        field = unknown["field"]
        what = f"unknown key {field!r}; {_nearest(field, _fields_at(root, path))}"
        return f"{line_of(text, (*path, field))}: {_dotted(path)}{what}"
    if choice is not None:
        known = ", ".join(sorted(_choices_at(root, path)))
        what = f"unknown value {choice['given']!r}; known here: {known}"
    return f"{line_of(text, path)}: {_dotted(path)}{what[0].lower()}{what[1:]}"


def _nearest(given: str, known: list[str]) -> str:
    return did_you_mean(given, known, f"known here: {', '.join(sorted(known))}", cutoff=0.5)


def _spelled(path: Path, complaint: str, raw: Any, root: type[msgspec.Struct]) -> Path:
    """`path` with the key in place of each "...", which stands for any key of a mapping: the one
    that brings the same complaint alone."""
    for position, step in enumerate(path):
        if step != "...":
            continue
        before = path[:position]
        table = _at(raw, before)
        for key in table if isinstance(table, dict) else ():
            alone = _replaced(raw, before, {key: table[key]})
            if _complaint(alone, root) == complaint:
                path, raw = (*before, key, *path[position + 1 :]), alone
                break
    return path


def _complaint(raw: Any, root: type[msgspec.Struct]) -> str:
    try:
        msgspec.convert(raw, root)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _at(raw: Any, path: Path) -> Any:
    for step in path:
        raw = raw[step]
    return raw


def _replaced(raw: Any, path: Path, value: Any) -> Any:
    """A copy of `raw` with `value` at `path`."""
    if not path:
        return value
    copy = raw.copy()
    copy[path[0]] = _replaced(raw[path[0]], path[1:], value)
    return copy


def _steps(path: str) -> Path:
    steps: list[Step] = []
    for step in _STEP.finditer(path):
        if step["index"] is not None:
            steps.append(int(step["index"]))
        else:
            steps.append(step["key"] or "...")
    return tuple(steps)


def _dotted(path: Path) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return f"{text.lstrip('.')}: " if text else ""


def _fields_at(root: Any, path: Path) -> list[str]:
    fields = getattr(_struct(_kind_at(root, path)), "fields", ())
    return [field.encode_name for field in fields]


def _choices_at(root: Any, path: Path) -> list[str]:
    """The values of an enumeration or a literal."""
    kind = _kind_at(root, path)
    values: Iterable[object] = getattr(_first(kind, "values"), "values", ())
    return [str(one) for one in values or getattr(_first(kind, "cls"), "cls", ())]


def _kind_at(root: Any, path: Path) -> Any:
    kind = msgspec.inspect.type_info(root)
    for step in path:
        kind = _step_into(kind, step)
    return kind


def _step_into(kind: Any, step: Step) -> Any:
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


def line_of(text: str, path: Path) -> int:
    """The line of the deepest part of `path` that the text spells out; 1 when none does."""
    best, depth = 1, 0
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        head = _TABLE.match(line)
        if head:
            table = _table_path(head["name"], counts, array=head["open"] == "[[")
            here = table
        else:
            key = _KEY.match(line)
            if key is None:
                continue
            here = (*table, key["key"].strip('"'))
        common = _common(here, path)
        if common > depth:
            best, depth = number, common
    return best


def _common(one: Path, other: Path) -> int:
    """How many steps two paths share from the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _table_path(name: str, counts: dict[Path, int], *, array: bool) -> Path:
    parts = [a or b for a, b in re.findall(r'"([^"]+)"|([A-Za-z0-9_-]+)', name)]
    path: Path = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        spelled = path
        if array and position == len(parts) - 1:
            counts[spelled] = counts.get(spelled, -1) + 1
        if spelled in counts:
            path = (*path, counts[spelled])
    return path
