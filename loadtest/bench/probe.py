"""The machine: what it is, its limits, and where the time of our rank goes. All optional tools."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from loadtest.bench import bounds
from loadtest.bench.bounds import Machine
from loadtest.bench.cast import Setting
from loadtest.bench.figures import OURS
from loadtest.bench.rounds import Contestants
from loadtest.bench.workload import Request

_LIMIT_S = 90.0
_PER_SECOND = 999
_NATIVE = "native-"


def describe() -> str:
    """Processor, cores, memory, kernel."""
    model = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def limits(setting: Setting) -> Machine | None:
    command = [
        sys.executable, "-m", "core.engine.limits", str(setting.model),
        "--threads", str(setting.threads), "--native", "on" if setting.native else "off",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=setting.project, check=True, capture_output=True, timeout=_LIMIT_S
        )
        return msgspec.json.decode(done.stdout, type=Machine)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        setting.say(f"  the machine's limits are not known: {error}")
        return None


def python_share(setting: Setting, group: Contestants) -> str | None:
    """Where a decode step's CPU time goes, by `perf` where it is there and allowed."""
    perf = shutil.which("perf")
    worker = group.workers.get(OURS)
    if perf is None or worker is None:
        return None
    data = setting.build / "perf.data"
    command = [
        perf, "record", "-q", "-e", "cpu-clock", "-F", str(_PER_SECOND), "-o", str(data),
        "-p", str(worker.started.pid),
    ]  # fmt: skip
    recorder = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with worker.turn():
            began = time.perf_counter()
            times = worker.play([Request(0.0, tuple(range(200, 328)), 384)], _LIMIT_S)
            seconds = time.perf_counter() - began
    finally:
        recorder.send_signal(signal.SIGINT)
        recorder.wait(_LIMIT_S)
    try:
        report = subprocess.run(
            [perf, "report", "-i", str(data), "--stdio", "--sort", "dso", "-F", "sample,dso"],
            capture_output=True, text=True, timeout=_LIMIT_S, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        setting.say(f"  the share of Python is not known: {error}")
        return None
    finally:
        data.unlink(missing_ok=True)
    parts = bounds.profile(report, _NATIVE)
    return bounds.profile_line(parts, _PER_SECOND, seconds) if parts and times else None
