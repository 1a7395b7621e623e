"""Header fields in order, without regard to case, with repeated ones kept apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Pairs = list[tuple[str, str]]


class Headers:
    """`get` of a repeated field joins its values; `get_all` does not."""

    def __init__(self, init: Headers | Mapping[str, Any] | Iterable[Iterable[Any]] | None = None):
        self._pairs: Pairs = []
        if isinstance(init, Headers):
            self._pairs = list(init._pairs)
            return
        items: Iterable[Iterable[Any]] = init.items() if isinstance(init, Mapping) else init or ()
        for name, value in (tuple(pair) for pair in items):
            self.append(name, value)

    @classmethod
    def new(cls, init: Any = None) -> Headers:
        """As `Headers.new` of `js`."""
        return cls(init)

    def append(self, name: str, value: Any) -> None:
        name, value = str(name), str(value)
        if not name or any(c in name + value for c in "\r\n\0") or ":" in name or " " in name:
            raise TypeError(f"Invalid header: {name!r}")
        self._pairs.append((name, value.strip()))

    def set(self, name: str, value: Any) -> None:
        self.delete(name)
        self.append(name, value)

    def delete(self, name: str) -> None:
        low = name.lower()
        self._pairs = [pair for pair in self._pairs if pair[0].lower() != low]

    def has(self, name: str) -> bool:
        return name in self

    def get_all(self, name: str, failobj: Any = None) -> Any:
        low = name.lower()
        return [value for key, value in self._pairs if key.lower() == low] or failobj

    def getSetCookie(self) -> list[str]:
        found: list[str] = self.get_all("set-cookie", [])
        return found

    def get(self, name: str, failobj: Any = None) -> Any:
        found = self.get_all(name)
        return ", ".join(found) if found else failobj

    def raw(self) -> Pairs:
        return list(self._pairs)

    def keys(self) -> list[str]:
        return list(dict.fromkeys(key.lower() for key, _ in self._pairs))

    def values(self) -> list[str]:
        return [self[key] for key in self.keys()]

    def items(self) -> Pairs:
        return [(key, self[key]) for key in self.keys()]

    entries = items

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def __delitem__(self, name: str) -> None:
        self.delete(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get_all(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __repr__(self) -> str:
        return f"Headers({self._pairs!r})"
