"""Waiting for what other processes do, with a deadline that fails the test."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def until(found: Callable[[], T], *, within_s: float = 30.0) -> T:
    """The first true value of `found`."""
    deadline = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    """Ended; one that nobody has waited for yet counts as ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
