"""A fake region for other processes: served by a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.edge.fakes import FakeRegion


@contextmanager
def served(region: FakeRegion) -> Iterator[str]:
    """Its address, until the block ends."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        async with region.serving():
            started.set()
            await ending.wait()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield region.address
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(30)
