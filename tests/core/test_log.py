"""One record, one line."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from core.log import setup


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    setup("edge/here", "INFO", stream=stream)
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)


def test_form(lines: io.StringIO) -> None:
    logging.getLogger("skerry.gateway").info("served id=%s ms=%d", "r1", 12)
    logging.getLogger("skerry.gateway").debug("not shown")
    logging.getLogger("httpx").info("not shown either")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO edge/here skerry\.gateway"
        r" served id=r1 ms=12\n",
        lines.getvalue(),
    )


def test_whatever_it_holds_a_record_is_one_line(lines: io.StringIO) -> None:
    log = logging.getLogger("skerry.x")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("bug\r\nhere")
    text = lines.getvalue()
    assert text.count("\n") == 1
    assert r"bug\r\nhere" in text
    assert "ValueError: two" in text
