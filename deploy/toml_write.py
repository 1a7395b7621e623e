"""A topology as TOML text, such that `core.config.parse` of it gives the same topology.

The standard library reads TOML but does not write it. Only what a topology holds is covered:
tables, arrays of tables, arrays of scalars, strings, integers, floats and booleans; None is left
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from core.config import Topology

Scalar = str | int | float | bool
_NO_DEFAULT: str = "\0"
Value = Scalar | Sequence["Value"] | Mapping[str, "Value"] | None


def dump(topology: Topology) -> str:
    table: Mapping[str, Value] = msgspec.to_builtins(topology, builtin_types=())
    return "\n".join(_table(table, ())).lstrip("\n") + "\n"


def fragment(path: tuple[str, ...], part: msgspec.Struct) -> list[str]:
    """One table of a topology under its header, if `path` is not empty; what is as it would be
    anyway is left out."""
    table: Mapping[str, Value] = {
        key: value
        for key, value in msgspec.to_builtins(part, builtin_types=()).items()
        if value != _usual(part, key)
    }
    header = [f"[{'.'.join(_key(one) for one in path)}]"] if path else []
    return [*header, *_table(table, path)]


def _usual(part: msgspec.Struct, key: str) -> Value:
    """The default of a key; its own value is never that of a key without one."""
    for one in msgspec.structs.fields(part):
        if one.name == key and one.default is not msgspec.NODEFAULT:
            usual: Value = msgspec.to_builtins(one.default, builtin_types=())
            return usual
        if one.name == key and one.default_factory is not msgspec.NODEFAULT:
            made: Value = msgspec.to_builtins(one.default_factory(), builtin_types=())
            return made
    return _NO_DEFAULT


def _table(table: Mapping[str, Value], path: tuple[str, ...]) -> Iterator[str]:
    """Scalars first: what follows a header belongs to that header."""
    for key, value in table.items():
        if value is not None and not _is_nested(value):
            yield f"{_key(key)} = {_inline(value)}"
    for key, value in table.items():
        here = (*path, key)
        header = ".".join(_key(part) for part in here)
        if isinstance(value, Mapping):
            yield from ("", f"[{header}]", *_table(value, here))
        elif _is_nested(value) and isinstance(value, Sequence):
            for item in value:
                if isinstance(item, Mapping):
                    yield from ("", f"[[{header}]]", *_table(item, here))


def _is_nested(value: Value) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _inline(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(_inline(item) for item in value)}]"
    return repr(value)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)
