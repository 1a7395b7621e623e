"""Lines that stay and the one that does not."""

import io

import pytest

from deploy.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_draws_the_live_line_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    out = Terminal()
    screen = Screen(out)
    screen.draw("waiting for all of them")
    screen.say("one is up")
    assert out.getvalue() == "\r\x1b[Kwaiting …\r\x1b[Kone is up\n"


def test_elsewhere_only_what_stays_is_written() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.draw("waiting")
    screen.say("one is up")
    assert out.getvalue() == "one is up\n"
