"""Puts the ranks of GPUs together. Imports what only a machine with one needs."""

from __future__ import annotations

from core.engine.gpu.cuda import CudaDevice
from core.engine.gpu.rank import Kit
from core.engine.gpu.runner import DeviceFollower, DeviceRunner
from core.engine.messages import RankConfig
from core.errors import ConfigError


def gpu_runner(config: RankConfig) -> DeviceRunner:
    """Raises ConfigError where Triton is not installed."""
    return DeviceRunner(config, _kit(config))


def gpu_follower(config: RankConfig) -> DeviceFollower:
    """Raises ConfigError as above."""
    return DeviceFollower(config, _kit(config))


def _kit(config: RankConfig) -> Kit:
    try:
        from core.engine.gpu.rehearsal import rehearse
        from kernels.triton.draw import draw
    except ImportError as error:
        raise ConfigError(f"device 'cuda' needs Triton, which is not there: {error}") from error
    return Kit(device=lambda: CudaDevice(config.gpu), rehearse=rehearse, draw=draw)
