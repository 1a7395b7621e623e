"""Small programs that stand in for edges, routers and nodes: `python -m tests.deploy.stubs HOW …`.

`live FILE`      write the pid to FILE, start a child that sleeps (its pid in FILE.child), wait for
                 SIGTERM and end with 0, or for SIGUSR1, say `unknown key` and end with 2
`stubborn FILE`  the same, but SIGTERM changes nothing
`node FILE`      the same, but SIGUSR1 ends it with 0, SIGTERM with 15, and its child, in a session
                 of its own, ends after it, when there is no FILE.hold
`loath FILE`     the same, but neither signal changes anything
`patient FILE`   write the pid to FILE, and end with 0 at the second SIGTERM
`die CODE TEXT`  write TEXT and end with CODE
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def publish(path: Path, pid: int) -> None:
    """Whole or not at all: readers poll for the file."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(str(pid), encoding="ascii")
    fresh.rename(path)


def live(path: Path, *, stubborn: bool) -> int:
    ended = threading.Event()
    code = 0

    def refuse(*_: object) -> None:
        nonlocal code
        print("unknown key", flush=True)
        code = 2
        ended.set()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: ended.set())
    signal.signal(signal.SIGUSR1, refuse)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    publish(path.with_name(path.name + ".child"), child.pid)
    publish(path, os.getpid())
    ended.wait()
    return code


RANK = """
import pathlib, sys, time
sys.stdin.read()
end = time.monotonic() + 20
while pathlib.Path(sys.argv[1]).exists() and time.monotonic() < end:
    time.sleep(0.01)
"""


def node(path: Path, *, loath: bool) -> int:
    ended = threading.Event()
    code = 0

    def asked(number: int, _: object) -> None:
        nonlocal code
        if not loath:
            code = 0 if number == signal.SIGUSR1 else number
            ended.set()

    signal.signal(signal.SIGTERM, asked)
    signal.signal(signal.SIGUSR1, asked)
    hold = path.with_name(path.name + ".hold")
    child = subprocess.Popen(
        [sys.executable, "-c", RANK, str(hold)], stdin=subprocess.PIPE, start_new_session=True
    )
    publish(path.with_name(path.name + ".child"), child.pid)
    publish(path, os.getpid())
    ended.wait()
    return code


def patient(path: Path) -> int:
    times = 0
    ended = threading.Event()

    def asked(*_: object) -> None:
        nonlocal times
        times += 1
        if times == 2:
            ended.set()

    signal.signal(signal.SIGTERM, asked)
    publish(path, os.getpid())
    ended.wait()
    return 0


def main() -> int:
    how, *rest = sys.argv[1:]
    if how in ("live", "stubborn"):
        return live(Path(rest[0]), stubborn=how == "stubborn")
    if how in ("node", "loath"):
        return node(Path(rest[0]), loath=how == "loath")
    if how == "patient":
        return patient(Path(rest[0]))
    print(rest[1], flush=True)
    return int(rest[0])


if __name__ == "__main__":
    sys.exit(main())
