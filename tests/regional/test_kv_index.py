"""The index says what a plain model of the nodes' caches says, and nothing when it cannot know."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.types import NodeName, PoolId
from regional.kv_index import BELOW, MEMORY, Held, KvIndex

A, B = PoolId(NodeName("a")), PoolId(NodeName("a"), 1)
CHAIN = [bytes([n]) * 16 for n in range(12)]

_some = st.lists(st.sampled_from(CHAIN), unique=True, max_size=8)
_event = st.tuples(st.booleans(), _some, _some, st.sampled_from([0, 0, 0, 0, 1]))


def fed(index: KvIndex, sequence: int, stored: list[bytes], *, snapshot: bool = False) -> bool:
    return index.apply(
        A, sequence=sequence, snapshot=snapshot, stored=b"".join(stored), evicted=b""
    )


@given(st.lists(_event, max_size=12))
def test_equals_a_plain_model(events: list[tuple[bool, list[bytes], list[bytes], int]]) -> None:
    index = KvIndex()
    index.join(A, limit=len(CHAIN))
    index.join(B, limit=len(CHAIN))
    held: set[bytes] | None = None  # None: unknown
    number = 0
    for snapshot, stored, evicted, skipped in events:
        number += 1 + skipped
        if snapshot:
            held = set()
        elif skipped:
            held = None
        if held is not None:
            held = (held - set(evicted)) | set(stored)
        known = index.apply(
            A,
            sequence=number,
            snapshot=snapshot,
            stored=b"".join(stored),
            evicted=b"".join(evicted),
        )
        assert known == index.known(A) == (held is not None)
        run = next((n for n, one in enumerate(CHAIN) if one not in (held or ())), len(CHAIN))
        assert index.overlap(A, CHAIN) == run
        assert index.size(A) == len(held or ())
        assert index.overlap(B, CHAIN) == 0


def test_a_gap_makes_a_node_unknown_until_its_snapshot() -> None:
    index = KvIndex()
    index.join(A, limit=100)
    assert not fed(index, 1, CHAIN)  # nothing is known before a snapshot
    assert fed(index, 2, CHAIN[:3], snapshot=True)
    assert fed(index, 3, CHAIN[3:4])
    assert index.overlap(A, CHAIN) == 4
    assert not fed(index, 5, CHAIN[4:])
    assert index.overlap(A, CHAIN) == 0
    assert not fed(index, 6, CHAIN)
    assert fed(index, 7, CHAIN[:2], snapshot=True)
    assert index.overlap(A, CHAIN) == 2


def test_it_dies_with_its_node() -> None:
    index = KvIndex()
    index.join(A, limit=100)
    fed(index, 1, CHAIN, snapshot=True)
    index.join(A, limit=100)  # a new session
    assert index.overlap(A, CHAIN) == 0
    fed(index, 1, CHAIN, snapshot=True)
    index.leave(A)
    index.leave(A)
    assert index.overlap(A, CHAIN) == 0
    assert not fed(index, 2, CHAIN, snapshot=True)


def test_the_pools_of_one_node_are_apart() -> None:
    index = KvIndex()
    for pool in (A, B):
        index.join(pool, limit=100)
    fed(index, 1, CHAIN, snapshot=True)
    assert (index.overlap(A, CHAIN), index.overlap(B, CHAIN)) == (len(CHAIN), 0)
    assert (index.known(A), index.known(B)) == (True, False)
    index.leave(B)
    assert index.overlap(A, CHAIN) == len(CHAIN)


def test_it_is_bounded_and_takes_whole_hashes_only() -> None:
    index = KvIndex()
    index.join(A, limit=5)
    assert fed(index, 1, CHAIN[:5], snapshot=True)
    assert not fed(index, 2, CHAIN[5:6])
    assert index.size(A) == 0
    assert fed(index, 3, CHAIN[:5], snapshot=True)
    assert not fed(index, 4, [b"short"])
    assert index.size(A) == 0


_tiers = st.sampled_from([MEMORY, BELOW])
_told = st.tuples(st.sampled_from([A, B]), _tiers, st.booleans(), _some, _some)


@given(st.lists(_told, max_size=16), st.integers(0, len(CHAIN)))
def test_runs_over_all_pools_and_tiers_equal_a_plain_model(
    events: list[tuple[PoolId, int, bool, list[bytes], list[bytes]]], length: int
) -> None:
    index = KvIndex()
    plain: dict[tuple[PoolId, int], set[bytes]] = {}
    numbers: dict[tuple[PoolId, int], int] = {}
    for pool in (A, B):
        index.join(pool, limit=len(CHAIN), below=len(CHAIN))
    for pool, tier, snapshot, stored, evicted in events:
        key = pool, tier
        numbers[key] = numbers.get(key, 0) + 1
        known = index.apply(
            pool,
            sequence=numbers[key],
            snapshot=snapshot,
            stored=b"".join(stored),
            evicted=b"".join(evicted),
            tier=tier,
        )
        assert known == (snapshot or key in plain)
        if known:
            before = set() if snapshot else plain[key]
            plain[key] = (before - set(evicted)) | set(stored)
    chain = CHAIN[:length]
    expected = {}
    for pool in (A, B):
        memory, lower = plain.get((pool, MEMORY), set()), plain.get((pool, BELOW), set())
        run = next((n for n, one in enumerate(chain) if one not in memory | lower), length)
        if run:
            expected[pool] = Held(run, sum(one not in memory for one in chain[:run]))
    assert index.overlaps(chain) == expected
    everything = set().union(*plain.values())
    assert index.blocks == len(everything)
    assert all(index.holds(one) == (one in everything) for one in CHAIN)
    index.leave(A)
    index.leave(B)
    assert index.blocks == 0


def test_a_tier_that_was_not_offered_holds_nothing() -> None:
    index = KvIndex()
    index.join(A, limit=100)
    told = {"stored": b"".join(CHAIN), "evicted": b""}
    assert not index.apply(A, sequence=1, snapshot=True, tier=BELOW, **told)
    assert index.overlaps(CHAIN) == {}
