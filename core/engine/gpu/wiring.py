"""Puts the runner of a GPU together. Imports what only a machine with one needs."""

from __future__ import annotations

from core.engine.gpu.cuda import CudaDevice
from core.engine.gpu.runner import DeviceRunner
from core.engine.messages import RankConfig
from core.errors import ConfigError


def gpu_runner(config: RankConfig) -> DeviceRunner:
    """Raises ConfigError where Triton is not installed."""
    try:
        from core.engine.gpu.rehearsal import rehearse
    except ImportError as error:
        raise ConfigError(f"device 'cuda' needs Triton, which is not there: {error}") from error
    return DeviceRunner(config, device=CudaDevice, rehearse=rehearse)
