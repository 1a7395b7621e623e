"""One connection between a front and an outpost. Both beat; who is silent or hangs up is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from core.errors import RequestError
from core.framing import FrameDecoder, encode_frame
from core.naps import nap
from regional.node.hosts.messages import BEAT_S, SILENT_S, Beat

Heard = TypeVar("Heard")
_READ_BYTES = 256 << 10


class Line(Generic[Heard]):
    """`kinds`: the union of what the other side says. `take` is called with each of its messages
    but beats, from `run`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kinds: Any,  # a union is not a type[Heard]
    ) -> None:
        self.take: Callable[[Heard], None] = lambda message: None
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder[Heard](kinds)
        self._early: list[Heard] = []
        self._heard_at = asyncio.get_running_loop().time()

    @property
    def here(self) -> str:
        """The address by which the other side can reach this host."""
        host: str = self._writer.get_extra_info("sockname")[0]
        return host

    def send(self, message: msgspec.Struct) -> None:
        """Dropped when the other side is gone, which ends `run`."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def first(self) -> Heard | None:
        """The first message; None when there is none, or none of ours."""
        while not self._early:
            if not await self._read():
                return None
        return self._early.pop(0)

    async def run(self) -> str:
        """Hear until the other side is gone: how that was noticed."""
        works = [
            asyncio.create_task(self._hear(), name="host-hear"),
            asyncio.create_task(self._beat(), name="host-beat"),
            asyncio.create_task(self._watch(), name="host-watch"),
        ]
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            return  # the other side is gone already, or does not read

    async def _hear(self) -> str:
        while True:
            early, self._early = self._early, []
            for message in early:
                self.take(message)
            if not await self._read():
                return "hung up"

    async def _read(self) -> bool:
        try:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                return False
            self._heard_at = asyncio.get_running_loop().time()
            for message in self._decoder.feed(data):
                if not isinstance(message, Beat):
                    self._early.append(message)
        except (OSError, RequestError):
            return False
        return True

    async def _beat(self) -> str:
        while True:
            self.send(Beat())
            await asyncio.sleep(BEAT_S)

    async def _watch(self) -> str:
        loop = asyncio.get_running_loop()
        while True:
            awake = await nap(BEAT_S)
            if not awake:  # as both may have been, if they were stopped: both begin anew
                self._heard_at = loop.time()
            if loop.time() - self._heard_at > SILENT_S:
                return f"was silent for {SILENT_S:g} s"
