"""Which sources and which Python a process of the world runs from."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError
from core.types import WIRE_VERSION

ROOT = Path(__file__).resolve().parents[1]
PROBE_S = 30.0
_PROBE = (
    "import json\n"
    "from core.release import release\n"
    "from core.types import WIRE_VERSION\n"
    "import deploy.child, edge, regional\n"
    "print(json.dumps({'version': release(), 'wire': WIRE_VERSION}))\n"
)


@dataclass(frozen=True, slots=True)
class Release:
    """`folder` holds the packages; `version` is what it calls itself."""

    folder: Path
    python: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.version or 'release'} in {self.folder}"

    def environment(self) -> dict[str, str]:
        """Ours, in which Python finds the modules of this release first."""
        places = filter(None, (str(self.folder), os.environ.get("PYTHONPATH")))
        return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def own() -> Release:
    """What this process runs from."""
    from core.release import release

    return Release(ROOT, sys.executable, release())


class _Told(msgspec.Struct):
    version: str
    wire: int


def release_at(folder: Path) -> Release:
    """The release in `folder`, with the Python of its `.venv` if it has one. It is asked which
    wire it speaks. Raises ConfigError when it cannot be run, or speaks another one than this."""
    folder = folder.resolve()
    own_python = folder / ".venv" / "bin" / "python"
    found = Release(folder, str(own_python) if own_python.exists() else sys.executable)
    if not (folder / "core").is_dir():
        raise ConfigError(f"{folder} holds no release: there is no package `core` in it")
    try:
        done = subprocess.run(
            [found.python, "-c", _PROBE],
            cwd=folder, env=found.environment(), capture_output=True, text=True, check=False,
            timeout=PROBE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the release in {folder} cannot be run: {error}") from error
    try:
        told = msgspec.json.decode(done.stdout, type=_Told)
    except msgspec.MsgspecError:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(f"the release in {folder} cannot be run: {last}") from None
    if told.wire != WIRE_VERSION:
        raise ConfigError(
            f"the release in {folder} speaks wire {told.wire}, this world {WIRE_VERSION}: they "
            "cannot serve side by side; start a world of its own with it"
        )
    return Release(found.folder, found.python, told.version)
