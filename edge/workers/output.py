"""A process's output, line by line, as lines of its Worker's log."""

from __future__ import annotations

import asyncio
import re

import msgspec

from edge.workers.logs import Budget, LogBook
from edge.workers.runtime import Run, Thrown
from edge.workers.sourcemap import SourceMap

CHUNK = 64 << 10
LIMIT = 64 << 10
"""Of one line; what is longer is cut."""
DROP_S = 0.001
"""Between two chunks that are thrown away: some fifty megabytes a second."""
_PLACE = re.compile(r"(?:file:///bundle/)?(?P<file>[\w.-]+\.m?js):(?P<line>\d+):(?P<column>\d+)")
"""With newer compatibility dates workerd names modules as URLs."""
_STACKS = ("stack:", "*** Received signal", "<--- Last few GCs")
_BLOCKED = re.compile(r".*: (?P<what>connecting to \S+ is not allowed)")
_NOISE = re.compile(r"\nstack: .*|; sentryErrorContext.*|; wdErrId.*", re.DOTALL)


class _Said(msgspec.Struct):
    """`source`: a place in the runtime's own code, for what the runtime itself says."""

    level: str = "log"
    message: str = ""
    source: str = ""


_said = msgspec.json.Decoder(_Said)
_run = msgspec.json.Decoder(Run)


class Reader:
    """`entry`: what the first module is called in stacks, whose places `places` translates."""

    def __init__(
        self, book: LogBook, version: str, mark: str, entry: str, places: SourceMap | None
    ) -> None:
        self._book = book
        self._version = version
        self._mark = f"{mark} "
        self._entry = entry
        self._places = places
        self.last = ""
        """The last thing that was said as an error: why a process did not start."""
        self.runs = 0
        """Requests and timers that were told."""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Until the stream ends."""
        loop = asyncio.get_running_loop()
        budget = Budget(loop.time())
        rest, dropped = b"", 0
        while piece := await stream.read(CHUNK):
            if not budget.spend(len(piece), loop.time()):
                dropped += len(piece)
                rest = b""
                if dropped > len(piece):
                    await asyncio.sleep(DROP_S)  # a flood is not worth all of our time
                    continue
                self._host(
                    "it says too much at once: its output is thrown away until it is quieter"
                )
                continue
            if dropped:
                self._host(f"{dropped / 1000:.0f} kB of its output were thrown away")
                piece, dropped = piece.partition(b"\n")[2], 0  # the line that was cut
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[:LIMIT]
            for line in lines:
                self.take(line)
        if rest:
            self.take(rest)

    def _host(self, what: str) -> None:
        self._book.say(self._version, "host", what)

    def take(self, line: bytes) -> None:
        try:
            said = _said.decode(line)
        except msgspec.MsgspecError:
            if text := line.decode("utf-8", "replace").strip():
                self._take_plain(text)
            return
        if said.source and said.message.startswith("NOSENTRY "):
            return  # a word among the runtime's makers
        if said.message.startswith(self._mark):
            self._take_run(said.message.removeprefix(self._mark))
            return
        message = self.readable(_NOISE.sub("", said.message))
        if said.source and (blocked := _BLOCKED.fullmatch(message)):  # the Worker hears nothing
            message = f"fetch: {blocked['what']} (workers.fetch of the topology)"
        if said.level in ("error", "fatal"):
            self.last = message
        self._book.say(self._version, said.level, message)

    def _take_plain(self, text: str) -> None:
        """What a runtime says when it dies, less its own stacks."""
        if not text.startswith(_STACKS):
            self.last = text
            self._book.say(self._version, "host", text)

    def _take_run(self, text: str) -> None:
        try:
            run = _run.decode(text)
        except msgspec.MsgspecError:
            return  # a request whose URL no JSON can hold: it was answered all the same
        thrown = tuple(
            Thrown(one.name, one.message, self.readable(one.stack)) for one in run.exceptions
        )
        run = msgspec.structs.replace(run, exceptions=thrown)
        self.runs += 1
        self._book.say(self._version, "run", "", run)

    def readable(self, text: str) -> str:
        """Places in the bundle as places in the sources."""
        if self._places is None:
            return text
        places = self._places

        def place(found: re.Match[str]) -> str:
            if found["file"] != self._entry:
                return found[0]
            source = places.find(int(found["line"]), int(found["column"]))
            return found[0] if source is None else str(source)

        return _PLACE.sub(place, text)
