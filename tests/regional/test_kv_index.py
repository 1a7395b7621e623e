"""The index says what a plain model of the nodes' caches says, and nothing when it cannot know."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.types import NodeName, PoolId
from regional.kv_index import KvIndex

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
