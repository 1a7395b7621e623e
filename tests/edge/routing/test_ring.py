"""The ring: the same for everyone, fair by weight, and calm when its members change."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import RegionName
from edge.routing.ring import Ring

NAMES = [RegionName(name) for name in ("eu", "us", "asia", "oz", "br")]
KEYS = [i.to_bytes(16) for i in range(4000)]


def _homes(ring: Ring) -> list[RegionName]:
    return [ring.walk(key)[0] for key in KEYS]


def test_a_walk_names_each_region_once_and_ignores_the_order_of_the_file() -> None:
    one, other = Ring(dict.fromkeys(NAMES, 100)), Ring(dict.fromkeys(reversed(NAMES), 100))
    for key in KEYS[:300]:
        assert one.walk(key) == other.walk(key)
        assert sorted(one.walk(key)) == sorted(NAMES)


def test_walks_are_fixed_for_ever() -> None:
    """Golden: a release that moves prefixes to other regions throws their caches away."""
    ring = Ring({RegionName("eu"): 100, RegionName("us"): 100, RegionName("asia"): 50})
    assert [ring.walk(bytes([i]) * 16) for i in range(10)] == GOLDEN


GOLDEN: list[tuple[str, ...]] = [
    ("eu", "us", "asia"),
    ("eu", "us", "asia"),
    ("us", "eu", "asia"),
    ("eu", "asia", "us"),
    ("us", "eu", "asia"),
    ("eu", "us", "asia"),
    ("eu", "us", "asia"),
    ("us", "eu", "asia"),
    ("asia", "eu", "us"),
    ("eu", "us", "asia"),
]


def test_shares_follow_weights() -> None:
    weights = dict(zip(NAMES, (100, 100, 100, 50, 50), strict=True))
    share = Counter(_homes(Ring(weights)))
    for name, weight in weights.items():
        assert share[name] / len(KEYS) == pytest.approx(weight / 400, rel=0.15)


def test_twenty_regions_of_one_weight_have_nearly_equal_shares() -> None:
    """Of the ring itself: a region's requests are spread about its share by chance on top."""
    names = [RegionName(f"region-{i}") for i in range(20)]
    ring = Ring(dict.fromkeys(names, 100))
    share = Counter(ring.walk(i.to_bytes(16))[0] for i in range(8000))
    assert max(share.values()) / 400 < 1.15  # 400 points a region give up to 1.2
    assert min(share.values()) / 400 > 0.85


@given(st.sampled_from(NAMES))
def test_only_the_keys_of_a_removed_region_move(gone: RegionName) -> None:
    full = Ring(dict.fromkeys(NAMES, 100))
    rest = Ring({name: 100 for name in NAMES if name != gone})
    for key in KEYS[:200]:
        assert rest.walk(key) == tuple(name for name in full.walk(key) if name != gone)


def test_a_lowered_weight_moves_keys_from_that_region_only() -> None:
    before = _homes(Ring(dict.fromkeys(NAMES, 100)))
    after = _homes(Ring({**dict.fromkeys(NAMES, 100), NAMES[0]: 50}))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert moved
    assert {old for old, _ in moved} == {NAMES[0]}


def test_an_empty_ring_leads_nowhere() -> None:
    assert Ring({}).walk(b"key") == ()
