"""The life of a rank that does not schedule: it computes what its leader casts, and lets its front
know that it lives. The main thread has the front's socket, a second one the leader's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from core.engine.link import Bell, Link
from core.engine.messages import EXIT_PEER, Pulse, Shutdown
from core.errors import NodeLost, SkerryError

_log = logging.getLogger("skerry.rank")
EXIT_ENGINE = 4


def follow(link: Link, bell: Bell, compute: Callable[[], None], *, pulse_s: float) -> int:
    """The exit status. `compute` runs on a thread of its own until it raises: NodeLost when the
    leader has gone, anything else when this rank cannot go on. When this returns for another
    reason the thread still waits: the process is to end."""
    status: list[int] = []

    def work() -> None:
        try:
            compute()
        except NodeLost as error:
            _log.debug("%s", error)
            status.append(EXIT_PEER)
        except SkerryError as error:
            _log.error("rank stopped: %s", error)
            status.append(EXIT_ENGINE)
        except Exception as error:  # noqa: BLE001 — whatever it is, the process ends with it
            _log.exception("rank stopped: %s", type(error).__name__)
            status.append(EXIT_ENGINE)
        finally:
            with suppress(OSError):  # the main thread may have left already
                bell.ring()

    threading.Thread(target=work, name="follow", daemon=True).start()
    while not status:
        wait_s = max(0.0, pulse_s - (time.monotonic() - link.sent_at))
        commands = link.receive(wait=True, bell=bell, at_most_s=wait_s)
        if link.closed or any(isinstance(one, Shutdown) for one in commands):
            return 0
        if time.monotonic() - link.sent_at >= pulse_s:
            link.send(Pulse())
    return status[0]
