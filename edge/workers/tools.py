"""The programs that Workers need and pip does not bring: workerd and esbuild, from npm.

`npm/package-lock.json` pins them with checksums. They are installed on demand into the environment
that runs us, and are offline from then on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigError

PINS = Path(__file__).parent / "npm"
SIZE_MB = 171
"""On disk; npm fetches about a third of it."""
_FILES = ("package.json", "package-lock.json", ".npmrc")
_STAMP = "skerry-stamp"
_PLATFORMS = {
    ("linux", "x86_64"): ("linux-64", "linux-x64"),
    ("linux", "aarch64"): ("linux-arm64", "linux-arm64"),
    ("darwin", "x86_64"): ("darwin-64", "darwin-x64"),
    ("darwin", "arm64"): ("darwin-arm64", "darwin-arm64"),
}
"""What the packages of workerd and esbuild are called here."""


def folder() -> Path:
    return Path(sys.prefix) / "skerry-npm"


def workerd() -> Path:
    """Raises ConfigError where it is not installed."""
    return _program("@cloudflare/workerd-", 0, "workerd")


def workerd_schema() -> Path:
    """The folder that its configuration imports from."""
    return folder() / "node_modules" / "workerd"


def esbuild() -> Path:
    """Raises ConfigError where it is not installed."""
    return _program("@esbuild/", 1, "esbuild")


def installed() -> bool:
    try:
        stamp = (folder() / _STAMP).read_text(encoding="ascii")
    except OSError:
        return False
    return stamp == _fingerprint()


def install(say: Callable[[str], None]) -> None:
    """Does nothing where all is there. Raises ConfigError."""
    if installed():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(
            "JavaScript Workers need workerd and esbuild, which npm installs once: install Node.js"
            " 18 or newer (it brings npm) and run this again"
        )
    _platform()
    say(f"Installing workerd and esbuild into {folder()} (once, {SIZE_MB} MB on disk)")
    fresh = folder().with_name(f"{folder().name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        for name in _FILES:
            shutil.copy(PINS / name, fresh / name)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=fresh, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"npm could not install workerd and esbuild: {done.stderr.strip()[-500:]}"
            )
        (fresh / _STAMP).write_text(_fingerprint(), encoding="ascii")
        shutil.rmtree(folder(), ignore_errors=True)
        fresh.rename(folder())
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _program(scope: str, which: int, name: str) -> Path:
    path = folder() / "node_modules" / f"{scope}{_platform()[which]}" / "bin" / name
    if not installed() or not path.exists():
        raise ConfigError(f"{name} is not installed on this machine: run `skerry worker setup`")
    return path


def _platform() -> tuple[str, str]:
    machine = platform.machine()
    found = _PLATFORMS.get((sys.platform, {"AMD64": "x86_64"}.get(machine, machine)))
    if found is None:
        raise ConfigError(f"workerd has no build for {sys.platform} on {machine}")
    return found


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        digest.update((PINS / name).read_bytes())
    return digest.hexdigest()
