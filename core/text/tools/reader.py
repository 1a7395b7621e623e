"""Calls read out of an answer's text while it is written.

What has gone out depends on the text so far and not on the pieces in which it came. Text that only
may become a call's marker is held back, like a stop string; white space around calls is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b

from core.events import ToolCallDelta
from core.text.tools.call import CallObject, NamedCall, State
from core.text.tools.formats import ToolFormat
from core.text.tools.scan import BLANKS

_SEPARATORS = ";,[]"
"""Between the calls of a form without markers, and around a list of them."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What a push let out; one entry for each call at most."""

    text: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class _At(Enum):
    START = auto()
    """Of an answer in a form without markers: a call may begin here."""
    TEXT = auto()
    CALL = auto()
    AFTER = auto()
    """Behind a call's object."""
    PROSE = auto()
    """No call can come any more."""


class CallReader:
    """`names`: of the tools that were offered; a form without markers calls no others. `several`
    False: calls after the first are dropped. `call_id` names the call of an index."""

    def __init__(
        self,
        form: ToolFormat,
        names: frozenset[str],
        call_id: Callable[[int], str],
        *,
        several: bool = True,
    ) -> None:
        self.calls = 0
        """Calls that have gone out, as far as they go."""
        self._opening = form.opening.strip()
        self._closing = form.closing.strip()
        self._around = tuple(one for one in form.around if one)
        self._named = form.named
        self._names = names
        self._call_id = call_id
        self._several = several
        self._at = _At.TEXT if self._opening else _At.START
        self._held = ""
        self._call = self._new_call()
        self._told = False
        """The present call's name has gone out."""
        self._text: list[str] = []
        self._deltas: dict[int, ToolCallDelta] = {}

    def push(self, text: str, *, last: bool = False) -> Pieces:
        """`last`: the answer ends here."""
        for char in text:
            self._take(char)
        if last:
            self._end()
        pieces = Pieces("".join(self._text), tuple(self._deltas.values()))
        self._text.clear()
        self._deltas.clear()
        return pieces

    def _take(self, char: str) -> None:
        match self._at:
            case _At.PROSE:
                self._text.append(char)
            case _At.TEXT:
                self._in_text(char)
            case _At.START:
                self._at_start(char)
            case _At.CALL:
                self._in_call(char)
            case _At.AFTER:
                self._after_call(char)

    def _in_text(self, char: str) -> None:
        """Let out what cannot be blanks before a marker, or a part of one."""
        self._held += char
        core = self._held.lstrip(BLANKS)
        while core and not any(mark.startswith(core) for mark in (self._opening, *self._around)):
            self._text.append(self._held[: len(self._held) - len(core) + 1])
            self._held = core[1:]
            core = self._held.lstrip(BLANKS)
        if core == self._opening:
            self._begin_call(keep=self._held[: -len(core)])
        elif core in self._around:
            self._held = ""

    def _at_start(self, char: str) -> None:
        self._held += char
        if char in BLANKS or (char == "[" and self._held.strip(BLANKS) == "["):
            return
        if char == "{":
            self._begin_call(keep=self._held[:-1])
            self._in_call(char)
        else:
            self._prose()

    def _begin_call(self, keep: str = "") -> None:
        """`keep`: what is text after all when it turns out to be no call."""
        self._held = keep
        self._call, self._told = self._new_call(), False
        self._at = _At.CALL

    def _new_call(self) -> CallObject | NamedCall:
        return NamedCall(self._named) if self._named else CallObject()

    def _in_call(self, char: str) -> None:
        call = self._call
        arguments = call.take(char)
        if call.name and not self._told:
            if not self._opening and call.name not in self._names:
                self._no_call()
                return
            self._tell(name=call.name)
        if arguments:
            self._tell(arguments=arguments)
        if call.state is State.BROKEN and not self._told:
            self._no_call()
        elif call.state in (State.BROKEN, State.DONE):
            self._at, self._held = _At.AFTER, ""

    def _tell(self, *, name: str | None = None, arguments: str = "") -> None:
        if name is not None:
            self._told = True
            self.calls += 1
        index = self.calls - 1
        if index and not self._several:
            return
        known = self._deltas.get(index)
        self._deltas[index] = ToolCallDelta(
            index=index,
            id=self._call_id(index) if name is not None else known.id if known else None,
            name=name if name is not None else known.name if known else None,
            arguments=(known.arguments if known else "") + arguments,
        )

    def _no_call(self) -> None:
        """It only looked like one: it is text, but for the markers."""
        self._text.append(self._held + self._call.raw)
        self._held = ""
        self._at = _At.AFTER if self._opening else _At.PROSE

    def _after_call(self, char: str) -> None:
        self._held += char
        core = self._held.lstrip(BLANKS)
        if self._opening:
            if core == self._closing:
                self._at, self._held = _At.TEXT, ""
            elif not self._closing.startswith(core):
                held, self._held, self._at = self._held, "", _At.TEXT
                for one in held:
                    self._take(one)
        elif char == "{":
            self._begin_call(keep=self._held[:-1])
            self._in_call(char)
        elif char not in BLANKS and char not in _SEPARATORS:
            self._prose()

    def _prose(self) -> None:
        self._text.append(self._held)
        self._held, self._at = "", _At.PROSE

    def _end(self) -> None:
        if self._at is _At.CALL and not self._told:
            self._no_call()
        if self._at is _At.TEXT and not self.calls:
            self._text.append(self._held)
        elif self._at is _At.TEXT:
            self._text.append(self._held.rstrip(BLANKS) if self._held.strip(BLANKS) else "")
        elif self._at is _At.START:
            self._text.append(self._held)
        self._held, self._at = "", _At.PROSE


def call_ids(request_id: str, choice: int) -> Callable[[int], str]:
    """Ids of the calls of one choice: the same each time that the request is answered."""

    def call_id(index: int) -> str:
        name = f"{request_id}/{choice}/{index}".encode()
        return "call_" + blake2b(name, digest_size=12).hexdigest()

    return call_id
