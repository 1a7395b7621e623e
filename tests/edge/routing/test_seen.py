"""One region in one edge's eyes: what the last frame cannot know yet."""

from __future__ import annotations

import pytest

from core.status import STALE_S, RegionStatus
from core.types import ModelName, RegionName
from edge.routing.seen import Heard, SeenRegion
from edge.routing.weights import WEIGHTS


def _seen() -> SeenRegion:
    heard = Heard()
    return SeenRegion(RegionName("eu"), 0.0, frozenset({ModelName("m")}), 100, heard)


def _tell(seen: SeenRegion, now: float, *, prefill: float = 0.0, queue: float = 0.0) -> None:
    seen.heard.take(
        RegionStatus(
            region=seen.name,
            epoch="e",
            sequence=int(now * 1000),
            prefill_work_s=prefill,
            queue_s=queue,
        ),
        now,
    )


def test_a_send_counts_until_it_has_been_read() -> None:
    seen = _seen()
    _tell(seen, 10.0)
    seen.sent([], 2.0, 10.0)
    assert seen.view(10.0).wait_s == pytest.approx(2.0)
    seen.read(2.0, 10.0, 11.0)
    assert seen.view(11.0).wait_s == 0.0


def test_the_last_frame_may_still_count_what_has_been_read() -> None:
    """Else the next prompt of a conversation, sent at once, runs away from its own shadow."""
    seen = _seen()
    seen.sent([], 0.4, 10.0)
    _tell(seen, 10.2, prefill=0.4)
    assert seen.view(10.3).wait_s > 0.4
    seen.read(0.4, 10.0, 10.3)
    assert seen.view(10.3).wait_s == pytest.approx(0.0, abs=1e-9)
    _tell(seen, 10.4, prefill=1.0)  # the next frame knows
    assert seen.view(10.4).wait_s == pytest.approx(1.0)


def test_a_busy_readers_backlog_counts_once() -> None:
    seen = _seen()
    _tell(seen, 10.0, prefill=0.8, queue=0.8)
    assert seen.view(10.0).wait_s == pytest.approx(0.8)
    _tell(seen, 11.0, prefill=0.8, queue=3.0)
    assert seen.view(11.0).work_s == pytest.approx(3.0)


def test_a_busy_region_works_off_what_it_spoke_of() -> None:
    """The older the frame, and the longer its way, the less of it is left; nothing below zero."""
    near, far = _seen(), SeenRegion(RegionName("eu"), 0.2, frozenset(), 100, Heard())
    for seen in (near, far):
        _tell(seen, 10.0, prefill=2.0)
    assert near.view(11.0).wait_s == pytest.approx(2.0 - WEIGHTS.drain)
    assert far.view(11.0).wait_s == pytest.approx(2.0 - WEIGHTS.drain * 1.1)
    near.sent([], 0.5, 12.9)
    assert near.view(12.9, stale_s=9.0).wait_s == pytest.approx(0.5)


def test_a_long_prefill_is_no_ill_health() -> None:
    """Minutes without a first delta, while the region's status goes on."""
    seen = _seen()
    _tell(seen, 10.0)
    seen.sent([], 120.0, 10.0)
    for second in range(11, 130):
        _tell(seen, float(second), prefill=130.0 - second)
        view = seen.view(second + 0.5)
        assert view.usable
        assert view.ramp == 1.0
    assert seen.view(130.0).wait_s < 2.0


def test_frames_count_by_epoch_and_sequence() -> None:
    """A late frame of an epoch changes nothing; a new epoch starts anew, with nothing held."""
    seen = _seen()
    _tell(seen, 10.0, prefill=5.0)
    seen.cache.sent([b"12345678"], 10.0)
    late = RegionStatus(region=seen.name, epoch="e", sequence=3, prefill_work_s=1.0)
    seen.heard.take(late, 10.1)
    assert seen.view(10.1).status is not late
    assert seen.cache.overlap([b"12345678"], 10.2) == 1
    anew = RegionStatus(region=seen.name, epoch="f", sequence=1)
    seen.heard.take(anew, 10.2)
    assert seen.view(10.2).status is anew
    assert seen.cache.overlap([b"12345678"], 10.2) == 0


def test_silence_makes_suspect_and_the_return_is_slow() -> None:
    seen = _seen()
    _tell(seen, 10.0)
    assert (seen.view(10.0).fresh, seen.view(10.0).ramp, seen.view(10.0).returned) == (
        True, 1.0, False,
    )  # fmt: skip
    assert not seen.view(10.0 + STALE_S).fresh
    _tell(seen, 20.0)
    view = seen.view(20.0)
    assert (view.fresh, view.returned) == (True, True)
    assert view.ramp < 0.2
