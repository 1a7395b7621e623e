"""What a rank's process is told about its threads, by whoever starts it."""

from __future__ import annotations

_SPINS = "40000"
"""Some tenths of a millisecond: from one step to the next, when a rank is busy. Waking a thread for
each of a step's calls costs a tenth of what it decodes at batch 1."""


def thread_environment(threads: int) -> dict[str, str]:
    """A thread that has nothing to do looks for work for a moment, then sleeps: spinning on, it
    would take the processor away from the machine's other processes."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPINS,
        "KMP_BLOCKTIME": "0",
    }
