"""Waits that know whether it was we who were away."""

from __future__ import annotations

import asyncio
import time

import pytest

from core import naps
from core.naps import Nap, nap


def test_a_wait_on_time_is_none_overslept() -> None:
    assert asyncio.run(nap(0.01))
    one = Nap(0.0)
    assert not one.overslept


def test_a_wait_in_which_the_process_stood_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naps, "OVERSLEPT_S", 0.1)

    async def frozen() -> bool:
        waiting = asyncio.create_task(nap(0.01))
        await asyncio.sleep(0)
        time.sleep(0.2)
        return await waiting

    assert not asyncio.run(frozen())
