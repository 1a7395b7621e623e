"""Answers in the place of a Worker that rests: whoever comes to its socket is refused at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from core.accepting import Spell
from core.errors import RequestError, WorkerResting
from edge.api.exchange import refusal_headers
from edge.api.openai_render import error_body
from edge.workers.rest import SAID, Rest

READ_S = 1.0
"""How long a caller may take to say what it wants."""


def resting(name: str, rest: Rest) -> WorkerResting:
    """What whoever asks it is told."""
    return WorkerResting(
        f"the Worker {name!r} rests: it was ended {rest.ends} times in a row, the last time since"
        f" it {SAID[rest.cause]}; see `skerry worker tail {name}`",
        retry_after_s=rest.left_s(time.time()),
    )


async def turn_away(
    listener: socket.socket, seconds: float, why: Callable[[], RequestError]
) -> None:
    """For so long answer everybody at `listener`, which does not block, with what `why` says."""
    loop = asyncio.get_running_loop()
    spell = Spell("worker-resting")
    async with asyncio.TaskGroup() as callers:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError as error:
                        await asyncio.sleep(spell.pause_s(error))
                        continue
                    callers.create_task(_refuse(connection, _answer(why())))


async def _refuse(connection: socket.socket, answer: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    try:
        with suppress(ConnectionError, TimeoutError, asyncio.LimitOverrunError,
                      asyncio.IncompleteReadError):  # fmt: skip
            async with asyncio.timeout(READ_S):
                await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
    finally:
        writer.close()


def _answer(error: RequestError) -> bytes:
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *refusal_headers(error),
    ]
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d Refused\r\n%s\r\n%s" % (error.http_status, head, body)
