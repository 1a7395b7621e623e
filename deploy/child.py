"""`python -m deploy.child FD MODULE ARGUMENTS…`: a module as a process that ends with its parent.

FD is the read end of a pipe whose write end only the launcher holds. When the launcher is gone,
however it went, the pipe closes; this process then asks itself to end as SIGTERM would, and after
a grace takes its whole process group down. Works wherever there are pipes.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 5.0


def main() -> None:
    link, module = int(sys.argv[1]), sys.argv[2]
    alone = threading.Event()
    threading.Thread(target=_follow, args=(link, alone), name="parent-link", daemon=True).start()
    sys.argv = [module, *sys.argv[3:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if alone.is_set():
            _end_group()  # what this process started ends with it


def _follow(link: int, alone: threading.Event) -> None:
    os.read(link, 1)  # nothing is ever written: this returns when the launcher is gone
    alone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    _end_group()


def _end_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
