"""JavaScript's plain values as Python sees them through Pyodide: items are attributes too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class JsObject(dict[str, Any]):
    """`found.name` is `found["name"]`; what is not there is an AttributeError, as in Pyodide."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__") and name in self:  # also one called `keys` or `items`
            return self[name]
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def to_py(self, **_: Any) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {name: plain(self[name]) for name in self}

    def object_entries(self) -> JsArray:
        return JsArray([JsArray((name, self[name])) for name in self])

    def object_keys(self) -> JsArray:
        return JsArray(self)

    def object_values(self) -> JsArray:
        return JsArray(self[name] for name in self)


class JsArray(list[Any]):
    @property
    def length(self) -> int:
        return len(self)

    def to_py(self, **_: Any) -> list[Any]:
        """Plain dictionaries and lists."""
        return [plain(value) for value in self]


def wrap(value: Any) -> Any:
    """JSON as JavaScript would hand it over."""
    if isinstance(value, Mapping):
        return JsObject((str(name), wrap(value[name])) for name in value)
    if isinstance(value, list | tuple | set | frozenset):
        return JsArray(wrap(one) for one in value)
    return value


def plain(value: Any) -> Any:
    """The other way round."""
    if isinstance(value, Mapping):
        return {str(name): plain(value[name]) for name in value}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def as_text(value: Any) -> str:
    """As `JSON.stringify` writes it: what is no number in JSON is null."""
    try:
        return _dumps(plain(value))
    except ValueError:
        return _dumps(_finite(plain(value)))


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_entries(entries: Iterable[Iterable[Any]]) -> JsObject:
    """`Object.fromEntries`."""
    return JsObject((str(name), value) for name, value in (tuple(pair) for pair in entries))


Converter = Callable[[Iterable[Iterable[Any]]], Any]
