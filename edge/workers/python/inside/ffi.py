"""`pyodide.ffi`: there is no border between two languages here, so most of it hands values back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .values import Converter, JsArray, JsObject, wrap

__all__ = ["JsArray", "JsException", "JsProxy", "create_once_callable", "create_proxy", "to_js"]

JsProxy = JsObject
_F = TypeVar("_F", bound=Callable[..., Any])


class JsException(Exception):
    """An error of JavaScript's; `name` and `message` are those of the error."""

    def __init__(self, message: str, name: str = "Error") -> None:
        super().__init__(message)
        self.name, self.message = name, message


class _Proxy:
    """A function that can be destroyed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)

    def destroy(self) -> None:
        self._function = _destroyed


def to_js(value: Any, *, dict_converter: Converter | None = None, **_: Any) -> Any:
    """Dictionaries become objects; with a `dict_converter`, whatever that makes of their items."""
    converted = wrap(value)
    if dict_converter is not None and isinstance(converted, JsObject):
        return dict_converter(converted.items())
    return converted


def create_proxy(value: _F, **_: Any) -> _Proxy:
    return _Proxy(value)


def create_once_callable(value: _F, **_: Any) -> _Proxy:
    return _Proxy(value)


def _destroyed(*_: Any, **__: Any) -> Any:
    raise JsException("This borrowed proxy was destroyed")
