"""The Unix socket of a running `skerry up`: its owner may ask, for what `messages` has."""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from core.accepting import Spell
from core.errors import ConfigError
from deploy.rollout.messages import Ask, Ended, Told

LONGEST_PATH = 100
"""Addresses of Unix sockets have a little over a hundred bytes."""
MOST_BYTES = 64 << 10
Tell = Callable[[Told], None]
_ask: msgspec.json.Decoder[Ask] = msgspec.json.Decoder(Ask)
_told: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, serve: Callable[[Ask, Tell], None]) -> None:
        self.serve = serve
        self._spell = Spell("control")
        super().__init__(path, _Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        """The base class tries again at once, whatever the error."""
        try:
            return super().get_request()
        except OSError as error:
            time.sleep(self._spell.pause_s(error))
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """The base class prints a traceback; a caller that has gone is no error."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        if not _is_ours(self.connection):
            return
        gone = False

        def tell(told: Told) -> None:
            """A caller who has gone changes nothing: what is begun is ended."""
            nonlocal gone
            if gone:
                return
            try:
                self.wfile.write(msgspec.json.encode(told) + b"\n")
            except OSError:
                gone = True

        try:
            ask = _ask.decode(self.rfile.readline(MOST_BYTES))
            self.server.serve(ask, tell)
        except msgspec.MsgspecError as error:
            tell(Ended(f"this world does not understand that: {error}"))
        except (ConfigError, OSError) as error:  # such as a disk that is full
            tell(Ended(str(error)))
        else:
            tell(Ended())


@contextmanager
def serving(path: Path, serve: Callable[[Ask, Tell], None]) -> Iterator[Path]:
    """Answer at `path`, or at a shorter one, which is given, until the block ends. `serve` runs in
    a thread for each caller; a ConfigError of it is told."""
    folder: Path | None = None
    where = path.resolve()
    if len(os.fsencode(where)) > LONGEST_PATH:
        folder = Path(tempfile.mkdtemp(prefix="skerry-control-"))
        where = folder / "control.sock"
    where.unlink(missing_ok=True)
    server = _Server(str(where), serve)
    where.chmod(0o600)
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="control")
    thread.start()
    try:
        yield where
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        where.unlink(missing_ok=True)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def ask(path: Path, what: Ask) -> Iterator[Told]:
    """All that is told but the end. Raises ConfigError when nobody answers, with the error that the
    end tells, and when there is no end."""
    line = msgspec.json.encode(what) + b"\n"
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            connection.sendall(line)
        except OSError as error:
            raise ConfigError(f"the running world does not answer at {path}: {error}") from error
        with connection.makefile("rb") as lines:
            while True:
                try:
                    told = _told.decode(lines.readline())
                except (OSError, msgspec.MsgspecError):
                    raise ConfigError("the world ended meanwhile") from None
                if isinstance(told, Ended):
                    if told.error:
                        raise ConfigError(told.error)
                    return
                yield told


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other side is of our user, where the system tells; the file's mode says so."""
    kind = getattr(socket, "SO_PEERCRED", None)
    if kind is None:
        return True
    with suppress(OSError):
        peer = connection.getsockopt(socket.SOL_SOCKET, kind, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", peer)
        return bool(user == os.getuid())
    return False
