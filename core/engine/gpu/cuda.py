"""The real side of `device`: one stream computes, one copies out, one copies in.

Not run by the tests, which have no GPU: everything that can be decided without one is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from core.engine.gpu.device import Mark
from core.errors import ConfigError, InternalError


class CudaDevice:
    """`core.engine.gpu.device.Device`; make it on the thread that gives everything."""

    def __init__(self, index: int = 0) -> None:
        """The machine's `index`-th GPU. Raises ConfigError where it has none of that number."""
        if not torch.cuda.is_available():
            raise ConfigError("device 'cuda': PyTorch finds no CUDA device on this machine")
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(f"CUDA device {index} is wanted, and this machine has {count}")
        torch.cuda.set_device(index)
        self.where = torch.device("cuda", index)
        self._compute = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]  # torch has no types here
        self._out = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]  # torch has no types here
        self._in = torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]  # torch has no types here
        self._graphs = torch.cuda.graph_pool_handle()
        torch.cuda.set_stream(self._compute)

    def mark(self) -> CudaMark:
        return CudaMark(self._compute)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        """Raises InternalError when the driver refuses: copies would then wait for the device."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            raise InternalError(f"the driver does not pin {memory.nbytes} bytes: error {status}")

    @contextmanager
    def leaving(self) -> Iterator[Callable[[], Mark]]:
        self._out.wait_stream(self._compute)
        with torch.cuda.stream(self._out):
            yield lambda: CudaMark(self._out)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        with torch.cuda.stream(self._in):
            yield
        self._compute.wait_stream(self._in)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """All graphs share one pool of memory: they are replayed one after another. Other threads
        may use the driver meanwhile, such as those that wait for marks."""
        self._compute.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._graphs, stream=self._compute, capture_error_mode="thread_local"
        ):
            run()

        def replay() -> None:
            graph.replay()

        return replay


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark), "marks of one device"
        return float(earlier._event.elapsed_time(self._event)) / 1e3
