"""A language of our own, whose Workers are one word long: a runtime without npm."""

from __future__ import annotations

import re
import sys
from typing import Final

from core.errors import WorkerRefused
from edge.workers.bundle import Bundle, Kv, Language, Module, Service, Settings
from edge.workers.runtime import Launch, Seat

LOOPED = re.compile("held its thread for|did not answer its host for")
"""Said of one that was ended while it looped. Where a busy machine hardly lets it compute, silence
is all that its host can tell."""
_PROCESS = r"""
import json, os, select, socket, sys, threading, time
fd, control, word, mark = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
inside = socket.socket(socket.AF_UNIX)
inside.bind(control)
inside.listen()
busy = threading.Event()

def say(level, message):
    print(json.dumps({"level": level, "message": message}), flush=True)

def serve(listener, answer):
    while True:
        select.select([listener], [], [])
        connection, _ = listener.accept()
        head = connection.recv(65536).decode()
        body = answer(head.split(" ")[1] if head else "/", head)
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        try:
            connection.sendall(head + body)
        except OSError:
            pass  # whoever asked has waited for long enough
        connection.close()

def outside(path, head):
    if path == "/end":
        say("error", "told to end")
        os._exit(3)
    if path == "/loop":
        busy.set()
        end = time.monotonic() + 30
        while time.monotonic() < end: pass
    say("log", f"asked for {path}")
    run = {"outcome": "ok", "method": "GET", "url": path, "status": 200}
    say("log", mark + " " + json.dumps(run))
    return f"{word} {os.environ.get('SECRET', '-')}".encode()

def control_word(path, head):
    while busy.is_set(): time.sleep(1)
    if path == "/scheduled":
        say("log", "timer " + head.rpartition("\r\n")[2])
        return json.dumps({"outcome": "ok"}).encode()
    return b"ok"

threading.Thread(target=serve, args=(inside, control_word), daemon=True).start()
serve(socket.socket(fileno=fd), outside)
"""


_NEVER_UP = {
    "broken": "import sys; sys.exit('broken as it is')",
    "waits": "import time; time.sleep(60)",
}


class Words:
    """A Worker's code is the word that it says; "broken" does not start, "waits" never does."""

    language: Final[Language] = "javascript"

    async def prepare(self, seat: Seat, bundle: Bundle) -> Launch:
        word = bundle.modules[0].body.decode()
        if word == "refused":
            raise WorkerRefused("this word is refused")
        code = _NEVER_UP.get(word, _PROCESS)
        argv = (sys.executable, "-S", "-c", code, str(seat.listener), str(seat.control), word,
                seat.mark)  # fmt: skip
        return Launch(argv, {"SECRET": seat.secrets.get("SECRET", "-")})

    async def release(self, seat: Seat) -> None:
        """Nothing is held for a process."""


def bundle_of(word: str, name: str = "w", **settings: object) -> Bundle:
    plain = {"name": name, "compatibility_date": "2025-10-08", **settings}
    made = Settings(**plain)  # type: ignore[arg-type] # the tests' own keywords
    return Bundle(settings=made, modules=(Module("worker.js", "esm", word.encode()),))


KV = Kv("KV", "space")
FRIEND = Service("FRIEND", "friend")
