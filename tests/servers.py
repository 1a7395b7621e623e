"""Servers of others that tests run against, as Debian packages them."""

from __future__ import annotations

import os
import shutil

import pytest


def needed(program: str) -> str:
    """Its path. Skips the test where it is not installed, or fails it where
    SKERRY_REQUIRE_SERVERS says that nothing may be skipped."""
    found = shutil.which(program)
    if found is not None:
        return found
    missing = f"{program} is not installed (Debian: apt-get install {program})"
    if os.environ.get("SKERRY_REQUIRE_SERVERS"):
        pytest.fail(f"{missing}, and SKERRY_REQUIRE_SERVERS is set")
    pytest.skip(missing)
