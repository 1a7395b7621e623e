"""The seam to a device that runs behind its host: marks in its stream, copies beside it, graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in what was given to the device."""

    def wait(self) -> None:
        """Until the device has come to it. From any thread."""
        ...

    def since(self, earlier: Mark) -> float:
        """Seconds of the device between two marks that it has passed."""
        ...


class Device(Protocol):
    """Everything is given by one thread; only marks are waited for by others."""

    @property
    def where(self) -> torch.device: ...

    def mark(self) -> Mark:
        """Of what computes."""
        ...

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies to and from by itself."""
        ...

    def pin(self, memory: Tensor) -> None:
        """Make that of host memory that exists."""
        ...

    def leaving(self) -> AbstractContextManager[Callable[[], Mark]]:
        """Copies that begin after what was given so far, beside what comes; gives their mark."""
        ...

    def arriving(self) -> AbstractContextManager[object]:
        """Copies for which everything given later waits, beside what was given before."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Keep what `run` gives to the device instead of giving it: the result does that, as often
        as it is called, on the same memory. It has run before. Raises RuntimeError when it cannot
        be kept."""
        ...


class HostDevice:
    """The device that is no other: everything has happened when a call returns."""

    where = torch.device("cpu")

    def mark(self) -> HostMark:
        return HostMark(time.perf_counter())

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def pin(self, memory: Tensor) -> None:
        """All of its memory is."""

    def leaving(self) -> AbstractContextManager[Callable[[], Mark]]:
        return nullcontext(self.mark)

    def arriving(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class HostMark:
    def __init__(self, at: float) -> None:
        self.at = at

    def wait(self) -> None:
        """It has been passed."""

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark), "marks of one device"
        return self.at - earlier.at
