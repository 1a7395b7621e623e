"""`skerry chat` from outside, against an edge that streams what it is told to."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from core.config import load
from deploy.commands import MAX_TOKENS
from deploy.where import SHIPPED

ROOT = Path(__file__).parents[2]
LEAST = MAX_TOKENS + 100
"""Tokens: the longest answer, and a short question with what a chat template adds."""


class Edge(ThreadingHTTPServer):
    """Says `comments`, `Hi` and then `ends`, or waits when that is empty. Keeps what is asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, object]] = []
        self.comments: tuple[str, ...] = ()
        self.ends = (
            b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
        )
        self.closed = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Edge

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()
        for comment in self.server.comments:
            self.wfile.write(f": {comment}\n\n".encode())
        self.wfile.write('data: {"choices": [{"delta": {"content": "Hi ☼"}}]}\n\n'.encode())
        self.wfile.write(self.server.ends)
        if not self.server.ends:
            self.server.closed.wait(30)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def edge() -> Iterator[Edge]:
    server = Edge()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.closed.set()
    server.shutdown()
    thread.join()
    server.server_close()


def command(edge: Edge, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", "chat", "--edge", edge.url, *arguments]


def chat(
    edge: Edge, *arguments: str, given: bytes = b"", **environment: str
) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        command(edge, *arguments),
        input=given, cwd=ROOT, capture_output=True, check=False, env=os.environ | environment,
    )  # fmt: skip


def test_an_answer_has_an_end_and_a_small_models_temperature(edge: Edge) -> None:
    done = chat(edge, "Hello")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "Hi ☼\n", b"")
    (body,) = edge.bodies
    assert (body["max_tokens"], body["temperature"]) == (512, 0.6)
    chat(edge, "Hello", "--max-tokens", "3", "--temperature", "0")
    assert (edge.bodies[1]["max_tokens"], edge.bodies[1]["temperature"]) == (3, 0.0)


def test_what_stdin_holds_is_the_question(edge: Edge) -> None:
    assert chat(edge, given="Grüße".encode()).returncode == 0
    assert edge.bodies[0]["messages"] == [{"role": "user", "content": "Grüße"}]


@pytest.mark.parametrize(
    ("arguments", "given", "words"),
    [
        ((), b"\xff", b"not UTF-8 text: byte 0"),
        ((os.fsdecode(b"\xff"),), b"", b"not UTF-8 text"),
        ((), b"", b"nothing was asked"),
        ((), b" \n", b"nothing was asked"),
        (("",), b"", b"nothing was asked"),
        (("Hi", "--model", os.fsdecode(b"\xff")), b"", b"not UTF-8 text"),
    ],
)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_no_question_is_one_line(
    edge: Edge, arguments: tuple[str, ...], given: bytes, words: bytes, locale: str
) -> None:
    done = chat(edge, *arguments, given=given, LC_ALL=locale)
    assert (done.returncode, done.stdout, edge.bodies) == (2, b"", [])
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_ascii_terminal_gets_the_answer(edge: Edge) -> None:
    assert chat(edge, "Hello", PYTHONIOENCODING="ascii").stdout == b"Hi ?\n"


def test_an_answer_that_breaks_off_ends_its_line(edge: Edge) -> None:
    edge.ends = b'data: {"error": {"message": "node lost"}}\n\n'
    done = chat(edge, "Hello")
    assert (done.returncode, done.stdout.decode()) == (2, "Hi ☼\n")
    assert b"broke off: node lost" in done.stderr


HELD = ("held, place 2 of 2", "held, place 1 of 2", "waiting")


def test_what_is_waited_for_is_said_once_and_not_in_the_answer(edge: Edge) -> None:
    edge.comments = HELD
    done = chat(edge, "Hello")
    assert (done.returncode, done.stdout.decode()) == (0, "Hi ☼\n")
    assert done.stderr == b"every region is busy: place 2 of 2 in the edge's line\n"


def test_on_a_terminal_it_is_taken_away_again(edge: Edge) -> None:
    edge.comments = HELD
    ours, theirs = pty.openpty()
    process = subprocess.run(
        command(edge, "Hello"), cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs)
    seen = os.read(ours, 4000)
    os.close(ours)
    assert process.stdout.decode() == "Hi ☼\n"
    first, last = b"place 1 of 2", b"no word of an answer yet"
    assert 0 < seen.index(first) < seen.index(last) < seen.rindex(b"\r\x1b[K")
    assert b"\n" not in seen.partition(b"(cut off")[0]


def test_ctrl_c_ends_the_line_first(edge: Edge) -> None:
    edge.ends = b""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(edge, "Hello"), cwd=ROOT, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        os.close(theirs)
        seen = os.read(ours, 100)
        while "☼".encode() not in seen:
            seen += os.read(ours, 100)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert os.read(ours, 100) == b"\r\n"
    os.close(ours)


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.toml")), ids=lambda file: file.stem)
def test_every_tenant_may_ask_what_chat_asks(file: Path) -> None:
    """But the one that is there to be refused."""
    tenants = load(file, state=ROOT).topology.tenants
    limits = {name: tenants[name].tokens_per_minute for name in tenants if name != "trial"}
    few = {name: limit for name, limit in limits.items() if limit is not None and limit < LEAST}
    assert not few, "a key of theirs could never chat"
