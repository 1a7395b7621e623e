"""Programs and libraries of others that tests run against, as Debian packages them.

A test that lacks one is skipped, or fails where SKERRY_REQUIRE_SERVERS says that nothing may be.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from typing import NoReturn

import pytest

_PACKAGES = {
    "bwrap": "bubblewrap",
    "promtool": "prometheus",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "systemd-analyze": "systemd",
}
"""Of programs that are not called like their package."""


def needed(program: str) -> str:
    """Its path."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        package = _PACKAGES.get(program, program)
        _without(f"{program} is not installed (Debian: apt-get install {package})")
    return found


def needed_mooncake() -> None:
    """Mooncake's engine, and the system's libraries that it takes."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("mooncake's engine is not to be had for this machine")
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        _without(f"mooncake's engine cannot be loaded ({error}); .ci/run knows what it takes")


def _without(missing: str) -> NoReturn:
    if os.environ.get("SKERRY_REQUIRE_SERVERS"):
        pytest.fail(f"{missing}, and SKERRY_REQUIRE_SERVERS is set")
    pytest.skip(missing)
