"""The hot set: global, with hysteresis and a dwell, the same on every edge."""

from __future__ import annotations

from core.types import RegionName
from edge.routing.hot import DWELL_S, FORGET_S, HotSets, version_of

NAMES = [RegionName(f"r{i}") for i in range(8)]
HOT, RARE = b"hot-pref", b"rare-pre"


def _told(sets: HotSets, count: float, total: float, now: float) -> frozenset[bytes]:
    """Every region says the same."""
    for name in NAMES:
        sets.take(name, {HOT: count}, total, now)
    return sets.settle(now).ids


def test_hot_is_a_share_of_all_regions_prompts_and_at_least_eight() -> None:
    sets = HotSets(8)
    assert _told(sets, 0.9, 10, 0) == frozenset()  # 7 of 80: a large share, too few
    assert _told(sets, 1.1, 10, 1) == {HOT}
    sets = HotSets(8)
    assert _told(sets, 15, 1000, 0) == frozenset()  # 120 of 8,000: 1.5 %
    assert _told(sets, 16, 1000, 1) == {HOT}


def test_spreading_a_beginning_does_not_cool_it() -> None:
    """A count over one region's own prompts would: then keys flip to and fro."""
    whole, spread = HotSets(8), HotSets(8)
    whole.take(NAMES[0], {HOT: 160}, 1000, 0)
    for name in NAMES[1:]:
        whole.take(name, {}, 1000, 0)
    for name in NAMES:
        spread.take(name, {HOT: 20}, 1000, 0)
    assert whole.settle(0).ids == spread.settle(0).ids == {HOT}
    assert whole.current.version == spread.current.version


def test_cold_again_below_half_and_not_before_the_dwell() -> None:
    sets = HotSets(8)
    assert _told(sets, 20, 1000, 0) == {HOT}
    assert _told(sets, 8, 1000, DWELL_S + 1) == {HOT}  # 0.8 %, above half of 1.56 %
    assert _told(sets, 7, 1000, DWELL_S + 2) == frozenset()
    assert _told(sets, 20, 1000, DWELL_S + 3) == frozenset()  # it has just cooled
    assert _told(sets, 20, 1000, 2 * DWELL_S + 3) == {HOT}
    assert _told(sets, 1, 1000, 2 * DWELL_S + 4) == {HOT}  # it has just become hot


def test_a_silent_region_is_forgotten() -> None:
    sets = HotSets(2)
    sets.take(NAMES[0], {HOT: 100}, 100, 0)
    sets.take(NAMES[1], {RARE: 9}, 100, 0)
    assert sets.settle(0).ids == {HOT}
    sets.take(NAMES[1], {RARE: 9}, 100, FORGET_S + 1)
    assert sets.settle(FORGET_S + 1).ids == {RARE}


def test_versions_name_the_members() -> None:
    assert version_of(frozenset()) == "0"
    assert version_of(frozenset({HOT, RARE})) == version_of(frozenset([RARE, HOT]))
    assert version_of(frozenset({HOT})) != version_of(frozenset({RARE}))
