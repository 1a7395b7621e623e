"""Ctrl-C in the middle of a deploy."""

from __future__ import annotations

import os
import signal

import pytest

from core.errors import ConfigError
from deploy.ssh.stopping import Stop


def test_the_first_signal_asks_for_the_way_back_once_and_the_second_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert stop.pause(0.0) is False
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(ConfigError, match="stopped"):
            stop.pause(5.0)
        assert stop.pause(0.0) is False  # the way back waits as well
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
