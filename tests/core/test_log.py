"""One record, one line."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator

import msgspec
import pytest

from core.config import parse
from core.errors import ConfigError
from core.log import setup
from tests.core.test_config import GOOD


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
    assert re.search(r" ValueError .*test_log\.py", text)


def test_what_an_error_says_is_not_logged_for_it_may_quote_a_prompt(lines: io.StringIO) -> None:
    try:
        try:
            raise ValueError("my secret prompt")
        except ValueError as error:
            raise ExceptionGroup("my secret group", [KeyError("my secret key")]) from error
    except ExceptionGroup:
        logging.getLogger("skerry.x").exception("bug id=%s", "r1")
    text = lines.getvalue()
    assert "bug id=r1" in text
    for kind in ("ExceptionGroup", "KeyError", "ValueError"):
        assert kind in text
    assert text.count("test_log.py:") >= 2, "where it was raised is told"
    assert "secret" not in text


def test_a_line_of_json_has_what_it_says_as_fields(lines: io.StringIO) -> None:
    setup("node/eu-1", form="json", stream=lines)
    log = logging.getLogger("skerry.request")
    log.info("answered id=%s outcome=%s ms=%d level=%d", "0123456789abcdef01234567", "ok", 12, 7)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("bug at=a b\nid=")
    first, second = (msgspec.json.decode(line) for line in lines.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "INFO",
        "process": "node/eu-1",
        "logger": "skerry.request",
        "message": "answered id=0123456789abcdef01234567 outcome=ok ms=12 level=7",
        "id": "0123456789abcdef01234567",
        "outcome": "ok",
        "ms": 12,
    }
    assert (second["level"], second["at"]) == ("ERROR", "a")
    assert second["message"].startswith("bug at=a b\nid= ValueError at ")
    assert "two" not in second["message"]


def test_a_path_that_is_not_utf8_is_no_line_that_is_lost(lines: io.StringIO) -> None:
    setup("node/eu-1", form="json", stream=lines)
    logging.getLogger("skerry.x").info("file=%s", os.fsdecode(b"/models/\xff.gguf"))
    told = msgspec.json.decode(lines.getvalue())
    assert told["file"] == "/models/\\udcff.gguf"


def test_a_topology_says_how_logs_are_written() -> None:
    assert parse(GOOD).observe.log == "text"
    assert parse(GOOD + '[observe]\nlog = "json"\n').observe.log == "json"
    with pytest.raises(ConfigError, match="observe"):
        parse(GOOD + '[observe]\nlog = "xml"\n')
