"""The rank's end of the socket pair: commands in, messages out, never stuck on a slow front.

What the front does not take at once is kept and sent later, so that the two can never wait for
each other; a front that takes nothing any more is given up at a limit.
"""

from __future__ import annotations

import os
import select
import socket
import time

from core.engine.messages import Command, RankMessage, command_decoder
from core.errors import InternalError
from core.framing import encode_frame

OUTBOX_BYTES = 64 << 20
_READ_BYTES = 1 << 18


class Bell:
    """Wakes the rank's thread, which waits on its socket, from another thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    def ring(self, _: object = None) -> None:
        os.write(self._writer, b"!")

    def rung(self) -> int:
        """How often since the last time."""
        try:
            return len(os.read(self._reader, _READ_BYTES))
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Nobody may ring any more."""
        os.close(self._reader)
        os.close(self._writer)


class Link:
    """Owns `sock`. `closed`: the front has gone; nothing comes and nothing is sent any more."""

    def __init__(self, sock: socket.socket, *, outbox_bytes: int = OUTBOX_BYTES) -> None:
        sock.setblocking(False)
        self.closed = False
        self.sent_at = time.monotonic()
        """When the last message went out, or was kept for later."""
        self._sock = sock
        self._decoder = command_decoder()
        self._outbox = bytearray()
        self._outbox_bytes = outbox_bytes

    def send(self, *messages: RankMessage) -> None:
        """Raises InternalError when the front has not read for too long."""
        for message in messages:
            self._outbox += encode_frame(message)
            self.sent_at = time.monotonic()
        self._flush()
        if len(self._outbox) > self._outbox_bytes:
            raise InternalError(f"the front leaves {len(self._outbox)} bytes unread")

    def send_with_descriptor(self, message: RankMessage, descriptor: int) -> None:
        """`message`, with `descriptor` travelling beside its first byte."""
        while self._outbox and not self.closed:
            select.select([], [self._sock], [])
            self._flush()
        if self.closed:
            return
        frame = encode_frame(message)
        self._sock.setblocking(True)
        try:
            sent = socket.send_fds(self._sock, [frame], [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
            return
        finally:
            self._sock.setblocking(False)
        self._outbox += frame[sent:]
        self._flush()

    def receive(
        self, *, wait: bool, bell: Bell | None = None, at_most_s: float | None = None
    ) -> list[Command]:
        """All commands that have come; with `wait`, at least one, unless the front goes, `bell`
        rings or `at_most_s` have passed.

        Raises VersionSkew for bytes that are no command.
        """
        until = None if at_most_s is None else time.monotonic() + at_most_s
        reading: list[socket.socket | Bell] = [self._sock, *([bell] if bell else [])]
        while not self.closed:
            left = None if until is None else max(0.0, until - time.monotonic())
            writing = [self._sock] if self._outbox else []
            readable, writable, _ = select.select(reading, writing, [], left if wait else 0)
            if writable:
                self._flush()
            commands = self._read() if self._sock in readable else []
            if commands or bell in readable or not wait or left == 0:
                return commands
        return []

    def close(self) -> None:
        self._sock.close()

    def _read(self) -> list[Command]:
        commands: list[Command] = []
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return commands
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
                return commands
            commands.extend(self._decoder.feed(data))

    def _flush(self) -> None:
        try:
            while self._outbox and not self.closed:
                sent = self._sock.send(self._outbox)
                del self._outbox[:sent]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True
