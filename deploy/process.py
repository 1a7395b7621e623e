"""One supervised process: started, watched, started again with a growing pause, ended.

Each runs in a process group of its own, so that Ctrl-C in a terminal reaches the launcher alone
and so that whatever the process started ends with it. A thread waits for its end: nothing polls.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from core.orders import RETIRE
from core.pauses import PAUSES, Pauses
from deploy.releases import Release, own

__all__ = ["PAUSES", "Pauses", "Process", "Spec", "describe_exit", "with_sources"]

CONFIG_EXIT = 2
"""Exit code of a process that refuses its configuration: starting it again cannot help."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run. `kind` is edge, router or node; `listeners` are sockets that it inherits, by
    their descriptors, and that its arguments name."""

    name: str
    kind: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    listeners: tuple[int, ...] = ()
    release: Release = field(default_factory=own)


def describe_exit(code: int) -> str:
    """`exit code 3`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def with_sources() -> dict[str, str]:
    """Our environment, in which Python finds the modules of this project first."""
    return own().environment()


class Process:
    """`link` is the pipe end that tells the child when the launcher is gone (deploy.child). The log
    is begun anew unless `append`."""

    def __init__(
        self,
        spec: Spec,
        *,
        link: int,
        say: Callable[[str], None],
        pauses: Pauses = PAUSES,
        append: bool = False,
    ) -> None:
        self.spec = spec
        self.exit_code: int | None = None
        """Set once the process has ended for good."""
        self.revive = False
        """Whether an end that nobody asked for is answered with a new start."""
        self.since = time.time()
        self._link = link
        self._say = say
        self._pauses = pauses
        self._stopping = threading.Event()
        self._swap = threading.Lock()
        if not append:
            self.spec.log.write_bytes(b"")
        self._popen = self._spawn()
        self._watcher = threading.Thread(target=self._watch, name=f"watch-{spec.name}")
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def last_lines(self, count: int = 8) -> list[str]:
        with self.spec.log.open(encoding="utf-8", errors="replace") as log:
            return [line.rstrip() for line in deque(log, maxlen=count)]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process itself, as an operator or the kernel would."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ask_to_end(self) -> None:
        """Asked a second time it is to end now."""
        self._ask(signal.SIGTERM)

    def retire(self) -> None:
        """To an edge that another process stands beside, or a node: it ends with its last
        answer."""
        self._ask(RETIRE)

    def ended_by(self, deadline: float) -> bool:
        """Wait for the end asked for until `deadline` (monotonic)."""
        self._watcher.join(max(0.0, deadline - time.monotonic()))
        return not self._watcher.is_alive()

    def end(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic) for the end asked for, then take the group down."""
        self._stopping.set()
        if not self.ended_by(deadline):
            self._kill_group()
        self._watcher.join()

    def _ask(self, number: signal.Signals) -> None:
        self._stopping.set()
        with self._swap:
            self._popen.send_signal(number)  # does nothing once the process was waited for

    def _spawn(self) -> subprocess.Popen[bytes]:
        release = self.spec.release
        command = [release.python, "-m", "deploy.child", str(self._link), self.spec.module]
        # Two may write to it, while one takes the other's place: each line goes to its end.
        with self.spec.log.open("ab") as log:
            return subprocess.Popen(
                [*command, *self.spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._link, *self.spec.listeners),
                start_new_session=True,
                env={**release.environment(), **self.spec.environment},
                cwd=release.folder,  # Python looks there before it looks anywhere else
            )

    def _watch(self) -> None:
        pause_s = 0.0
        while True:
            started = time.monotonic()
            code = self._popen.wait()
            self._kill_group()  # what the process started and left behind
            if self._stopping.is_set() or not self.revive or code == CONFIG_EXIT:
                self.exit_code = code
                if self.revive and not self._stopping.is_set():
                    self._say(f"{self.spec.name} refused to start: {self._reason()}")
                return
            pause_s = self._pauses.after(pause_s, time.monotonic() - started)
            self._say(
                f"{self.spec.name} ended ({describe_exit(code)}), starting again in {pause_s:.1f} s"
            )
            if self._stopping.wait(pause_s):
                self.exit_code = code
                return
            with self._swap:
                if self._stopping.is_set():
                    self.exit_code = code
                    return
                self._popen = self._spawn()
                self.since = time.time()

    def _reason(self) -> str:
        return (self.last_lines(1) or ["its log is empty"])[0]

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of none
            os.killpg(self._popen.pid, signal.SIGKILL)
