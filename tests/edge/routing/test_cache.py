"""What an edge believes a region to hold."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from core.digest import MAX_ENTRIES, Filter, build
from core.status import RegionPrefixes
from core.types import RegionName
from edge.routing.cache import SENT_MOST, SENT_S, Digest, RegionCache, counts_of

IDS = [(i * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8) for i in range(1, 40_001)]


def _frame(
    base: int, *, held: Iterable[bytes] | None = None, added: Iterable[bytes] = (), epoch: str = "e"
) -> RegionPrefixes:
    return RegionPrefixes(
        region=RegionName("eu"),
        epoch=epoch,
        version=1,
        base=base,
        filter=None if held is None else build(list(held)),
        added=b"".join(added),
    )


@given(st.sets(st.sampled_from(IDS), max_size=300))
def test_a_filter_never_denies_what_is_in(ids: set[bytes]) -> None:
    made = build(ids)
    assert all(made.holds(one) for one in ids)
    assert len(made.bits) <= 8 + len(ids) * 10 // 8 + 1


def test_a_filter_rarely_claims_what_is_not_in() -> None:
    made = build(IDS[:4000])
    wrong = sum(made.holds(one) for one in IDS[4000:24_000]) / 20_000
    assert 0.005 < wrong < 0.02
    assert not any(Filter().holds(one) for one in IDS[:100])


def test_a_filter_is_bounded() -> None:
    made = build(IDS)
    assert len(made.bits) * 8 <= MAX_ENTRIES * 10 + 8
    assert all(made.holds(one) for one in IDS[:MAX_ENTRIES])


def test_overlap_is_the_length_of_the_held_beginning() -> None:
    digest = Digest()
    digest.take(_frame(1, held=IDS[:1000]))
    cache = RegionCache(digest)
    for held in (0, 1, 2, 3, 17, 64, 100):
        assert cache.overlap([*IDS[:held], *IDS[9000 : 9000 + 100 - held]], 0.0) == held
    assert cache.overlap([], 0.0) == 0


def test_a_single_false_hit_deep_in_a_prompt_is_not_believed() -> None:
    digest = Digest()
    digest.take(_frame(1, held=IDS[:4000]))
    cache, wrong = RegionCache(digest), 0
    for start in range(5000, 25_000, 40):
        wrong += cache.overlap(IDS[start : start + 40], 0.0) > 2
    assert wrong <= 2  # of 500; about 30 if one look were enough


def test_frames_build_on_the_filter_that_was_seen() -> None:
    digest = Digest()
    digest.take(_frame(1, held=IDS[:10]))
    digest.take(_frame(1, added=IDS[10:12]))
    assert [digest.holds(one) for one in (IDS[0], IDS[11], IDS[13])] == [True, True, False]
    digest.take(_frame(1, added=IDS[10:13]))
    assert digest.holds(IDS[12])
    digest.take(_frame(2, added=IDS[12:13]))  # its filter was missed: only what is added is known
    assert [digest.holds(one) for one in (IDS[0], IDS[12])] == [False, True]
    digest.take(_frame(2, held=IDS[:10]))
    assert digest.holds(IDS[0])
    digest.take(_frame(2, epoch="restarted"))
    assert not digest.holds(IDS[0])
    digest.take(_frame(3, held=IDS[:10]))
    digest.clear()
    assert not digest.holds(IDS[0])


def test_own_sends_bridge_the_time_until_the_next_digest() -> None:
    digest = Digest()
    cache = RegionCache(digest)
    cache.sent(IDS[:5], 100.0)
    assert cache.overlap(IDS[:9], 100.0) == 5
    assert cache.overlap(IDS[:9], 100.1 + SENT_S) == 0
    cache.sent(IDS[:5], 200.0)
    cache.refused(IDS[3:5])
    assert cache.overlap(IDS[:9], 200.0) == 3
    digest.clear()
    assert cache.overlap(IDS[:9], 200.0) == 0  # the region was lost, and that with it
    cache.sent(IDS[: SENT_MOST + 100], 201.0)
    assert cache.overlap([IDS[0]], 201.0) == 0  # bounded: the oldest went
    assert cache.overlap([IDS[SENT_MOST + 99]], 201.0) == 1


def test_counts_travel() -> None:
    frame = RegionPrefixes(
        region=RegionName("eu"), epoch="e", version=1, hot=IDS[0] + IDS[1], counts=(2.5, 1.0)
    )
    assert counts_of(frame) == {IDS[0]: 2.5, IDS[1]: 1.0}
