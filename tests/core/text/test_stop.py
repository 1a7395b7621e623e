"""Stop strings across pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.text.stop import StopMatcher

TEXT = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read letter by letter; stop where any stop string has just become complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 24)))
def test_any_split_gives_the_same_as_reading_letters(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    out = "".join(matcher.feed(text[start:end]) for start, end in pairwise(edges))
    out += matcher.flush()
    assert (out, matcher.matched) == oracle(text, stops)


@settings(deadline=None)
@given(text=TEXT, stops=STOPS)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = matcher.feed(text)
    if not matcher.matched:
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_longest_of_those_complete_at_one_point_counts() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.feed("xab") == "x"
    assert matcher.matched


@pytest.mark.parametrize("stops", [(), ("",)])
def test_without_stops_all_goes_out(stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed("text") == "text"
    assert not matcher.matched


def test_after_a_match_nothing_goes_out() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("a.b") == "a"
    assert matcher.feed("c") + matcher.flush() == ""


def test_long_stop_strings_stay_quick() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"])
    out = "".join(matcher.feed("a" * 10) for _ in range(300)) + matcher.flush()
    assert out == "a" * 3000
