"""The measurements: one caller on one connection, request after request."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.edge.clients import HOST
from loadtest.edge.doubles import MODEL
from loadtest.workers.cast import Edge

QUESTION = b'{"prompt": "How far is it to the next lighthouse?", "max_tokens": 1}'
DIRECT = f"/client/v4/accounts/bench/ai/run/{MODEL}"
_HEADERS = {"content-type": "application/json"}


class WrongAnswer(Exception):
    """What came is not what was asked for."""


class Caller:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=60)

    def ask(self, path: str, body: bytes = QUESTION) -> float:
        """Milliseconds to the end of the answer. Raises WrongAnswer."""
        began = time.perf_counter()
        self._connection.request("POST", path, body, _HEADERS)
        answer = self._connection.getresponse()
        said = answer.read()
        spent = (time.perf_counter() - began) * 1000
        if answer.status != 200:
            raise WrongAnswer(f"{path}: {answer.status} {said[:200].decode(errors='replace')}")
        return spent

    def times(self, path: str, count: int) -> list[float]:
        return [self.ask(path) for _ in range(count)]

    def close(self) -> None:
        self._connection.close()


@contextmanager
def calling(port: int) -> Iterator[Caller]:
    caller = Caller(port)
    try:
        yield caller
    finally:
        caller.close()


def cold(edge: Edge, name: str) -> float:
    """Milliseconds that the first request after a rest takes longer than the next one."""
    edge.wait_until_cold(name)
    with calling(edge.port) as caller:
        first = caller.ask(f"/w/{name}/")
        warm = sorted(caller.times(f"/w/{name}/", 20))[10]
    return first - warm


@contextmanager
def looping(edge: Edge, name: str) -> Iterator[None]:
    """Somebody asks the Worker that never ends, again each time it was ended or rests."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            connection = http.client.HTTPConnection(HOST, edge.port, timeout=120)
            try:
                connection.request("POST", f"/w/{name}/", QUESTION, _HEADERS)
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                pass  # it was ended
            finally:
                connection.close()
            over.wait(0.05)

    thread = threading.Thread(target=ask, name="looping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def spinning() -> Iterator[None]:
    """A process that computes at the lowest priority, and has nothing to do with Workers."""
    code = "import os\nos.nice(19)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()
