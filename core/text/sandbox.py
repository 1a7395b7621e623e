"""A Jinja2 environment for templates that come with a model, which we do not trust.

Jinja2's own sandbox keeps a template from reaching Python. What it leaves open is work without
end: loops in loops, calls that call themselves twice, one expression that makes a gigabyte. Here
every loop turn and every call is counted against a `Meter` of CPU seconds and characters, and
operations that make much out of little are checked before they run.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import TemplateRefused

_WIDTH = 10_000
"""No template pads, indents or repeats further."""
_NO_FILTERS = frozenset({"center", "pprint", "random", "urlize", "wordwrap", "xmlattr"})
"""No chat needs them, and they are not the same twice or make much out of little."""
_PADDING = frozenset({"indent", "batch", "slice", "round"})
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*(?:\d{4}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(?:\d{4}|\{)")


class Meter:
    """What one rendering may use: CPU seconds, and characters of any one text."""

    def __init__(self, *, cpu_s: float, chars: int) -> None:
        self.cpu_s = cpu_s
        self.chars = chars
        self._deadline = time.thread_time() + cpu_s

    def tick(self) -> None:
        """Call at every turn. CPU time of this thread: a busy machine refuses nobody."""
        if time.thread_time() > self._deadline:
            raise _refused(f"the chat template takes more than {self.cpu_s} s")

    def reserve(self, size: int) -> None:
        """Call before something of `size` characters or items is made."""
        if size > self.chars:
            raise _refused(f"the chat template makes more than {self.chars} characters")

    def measure(self, value: object) -> None:
        if isinstance(value, str | list | tuple):
            self.reserve(len(value))


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates as transformers does, with meters. Render inside `metered`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        self._meter: ContextVar[Meter] = ContextVar("meter")
        self.filters = {
            name: self._guarded(name, call)
            for name, call in self.filters.items()
            if name not in _NO_FILTERS
        }
        self.filters |= {"tojson": _tojson, "_turns": self._turns, "_measured": self._measured}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception

    @contextmanager
    def metered(self, meter: Meter) -> Iterator[None]:
        token = self._meter.set(meter)
        try:
            yield
        finally:
            self._meter.reset(token)

    def render(self, template: Template, meter: Meter, **values: object) -> str:
        """Raises TemplateRefused, and whatever a template's own mistakes raise."""
        pieces: list[str] = []
        total = 0
        with self.metered(meter):
            for piece in template.generate(**values):
                meter.tick()
                total += len(piece)
                meter.reserve(total)
                pieces.append(piece)
        return "".join(pieces)

    # ------------------------------------------------------------- hooks of Jinja2

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree, with a counting filter around what loops run over and texts grow by."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_turns")
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = _filtered(block.filter, "_measured")
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = _filtered(assignment.node, "_measured")
        return tree

    def call(
        __self,  # the parent's signature: a template may pass `self` by name
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        meter = __self._meter.get()
        meter.tick()
        for argument in args:
            meter.measure(argument)
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            _check_widths(args, kwargs)
            _check_spread(getattr(__obj, "__name__", ""), (subject, *args), meter)
        value = super().call(__context, __obj, *args, **kwargs)
        meter.measure(value)
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self._meter.get()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(other, int):
                    meter.reserve(len(one) * other)
        elif operator == "**" and not _small_power(left, right):
            raise _refused("the chat template makes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        value = super().call_binop(context, operator, left, right)
        meter.measure(value)
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(str(value.__self__), _WIDE_BRACES)
        return wrapped

    # ------------------------------------------------------------- filters

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        return _counted(items, self._meter.get())

    def _measured(self, value: object) -> object:
        self._meter.get().measure(value)
        return value

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)  # also carries Jinja2's marks over
        def guarded(*args: Any, **kwargs: Any) -> Any:
            meter = self._meter.get()
            meter.tick()
            if name in _PADDING:
                _check_widths(args[1:], kwargs)
            elif name == "format":
                _check_format(str(args[0]))
            elif name in {"replace", "join"}:
                _check_spread(name, args[1:], meter)  # the first is Jinja2's evaluation context
            value = call(*args, **kwargs)
            meter.measure(value)
            return value

        return guarded


def strftime_at(unix_s: int) -> Callable[[str], str]:
    """`strftime_now` of templates: the same for everybody who renders one request."""

    def strftime_now(pattern: str) -> str:
        _check_format(pattern)
        return datetime.fromtimestamp(unix_s, UTC).strftime(pattern)

    return strftime_now


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are just words."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes for HTML."""
    _check_widths((indent,), {})
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise _refused(str(message))


def _check_widths(args: Iterable[object], kwargs: dict[str, object]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _WIDTH:
            raise _refused("the chat template pads with a width that is too large")


def _check_format(pattern: str, wide: re.Pattern[str] = _WIDE_PERCENT) -> None:
    if wide.search(pattern):
        raise _refused("the chat template formats with a width that is too large")


def _check_spread(name: str, args: tuple[Any, ...], meter: Meter) -> None:
    """Texts put into many places of another: `replace` and `join`, as methods and as filters."""
    if name == "replace" and len(args) >= 3:
        subject, old, new = str(args[0]), str(args[1]), str(args[2])
        meter.reserve(len(subject) + subject.count(old) * len(new))
    elif name == "join" and len(args) >= 2:
        texts, between = (args[1], args[0]) if isinstance(args[0], str) else (args[0], args[1])
        if isinstance(texts, list | tuple):
            meter.reserve(len(texts) * len(str(between)))


def _counted(items: Iterable[Any], meter: Meter) -> Iterator[Any]:
    for item in items:
        meter.tick()
        yield item


def _small_power(base: object, exponent: object) -> bool:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * exponent <= _WIDTH
    return True


def _refused(message: str) -> TemplateRefused:
    return TemplateRefused(message, param="messages")
