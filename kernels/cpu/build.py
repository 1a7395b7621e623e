"""Compile the native kernels: `python -m kernels.cpu.build`, at set-up.

The library lies in the virtual environment under a name made of sources, flags and processor, so
that a changed source or another machine never meets a wrong one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
)  # fmt: skip


def library_path() -> Path:
    """Where the library for these sources and this processor lies, or would lie."""
    state = blake2b(" ".join(_FLAGS).encode() + _processor().encode(), digest_size=8)
    for path in sorted([*_FOLDER.glob("*.cpp"), *_FOLDER.glob("*.h")]):
        state.update(path.read_bytes())
    key = state.hexdigest()
    return Path(sys.prefix) / "share" / "skerry" / f"native-{key}.so"


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, else what is on the path."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def build() -> str | None:
    """Make the library unless it is there. Returns why it could not be made, or None."""
    path = library_path()
    if path.exists():
        return None
    command = compiler()
    if command is None:
        return "no C++ compiler was found"
    sources = [str(source) for source in sorted(_FOLDER.glob("*.cpp"))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run(
                [command, *_FLAGS, "-o", str(made), *sources],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or ["no message"]
                return f"{command} failed: {last[0]}"
            made.replace(path)  # whole or not at all, also when two set-ups race
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def main() -> int:
    reason = build()
    sys.stdout.write(f"native kernels: {reason or library_path()}\n")
    return 1 if reason else 0


if __name__ == "__main__":
    raise SystemExit(main())
