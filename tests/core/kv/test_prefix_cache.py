from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.errors import InternalError
from core.kv.prefix_cache import CachedBlock, PrefixCache, TokenChain
from core.prefix import block_hashes, block_root
from core.types import BLOCK_TOKENS

ROOT = block_root(b"model", "")


def chain(tokens: Sequence[int], root: bytes = ROOT) -> TokenChain:
    return TokenChain(root, list(tokens))


def store(cache: PrefixCache, of: TokenChain, count: int, first: int = 0) -> list[CachedBlock]:
    """Register blocks 0 … count−1 of a chain in pool blocks first, first+1, …"""
    entries: list[CachedBlock] = []
    for index in range(count):
        parent = entries[-1] if entries else None
        entry = cache.add(of, index, parent, (first + index,))
        assert entry is not None
        entries.append(entry)
    return entries


def test_chain_hashes_are_the_platforms_and_grow_with_the_tokens() -> None:
    tokens = list(range(40))
    of = TokenChain(ROOT, tokens)
    assert of.digest(1) == block_hashes(ROOT, tokens)[1]
    tokens.extend(range(40, 64))
    assert [of.digest(i) for i in range(4)] == block_hashes(ROOT, tokens)


def test_find_gives_the_longest_registered_start_and_no_more_than_asked() -> None:
    cache = PrefixCache()
    entries = store(cache, chain(range(48)), 3)
    assert cache.find(chain(range(64)), 4) == entries
    assert cache.find(chain(range(64)), 2) == entries[:2]
    assert cache.find(chain([*range(16), *range(100, 132)]), 3) == entries[:1]
    assert cache.find(chain(range(1, 49)), 3) == []


def test_find_never_crosses_namespaces() -> None:
    cache = PrefixCache()
    store(cache, chain(range(16)), 1)
    assert cache.find(chain(range(16), block_root(b"model", "tenant")), 1) == []
    assert cache.find(chain(range(16), block_root(b"other", "")), 1) == []


def test_equal_hashes_of_different_tokens_are_told_apart() -> None:
    def weak(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return b"same" if len(parent) == 16 else b"next"

    cache = PrefixCache()
    one = TokenChain(ROOT, list(range(32)), weak)
    two = TokenChain(ROOT, list(range(100, 132)), weak)
    first = cache.add(one, 0, None, (0,))
    assert cache.find(two, 1) == []
    assert cache.add(two, 0, None, (1,)) is None
    assert cache.find(one, 1) == [first]


def test_equal_blocks_under_different_parents_are_told_apart() -> None:
    def blind(parent: bytes, token_ids: Sequence[int]) -> bytes:
        return repr(token_ids).encode()  # forgets what came before

    cache = PrefixCache()
    one = TokenChain(ROOT, [*range(16), *range(50, 66)], blind)
    two = TokenChain(ROOT, [*range(20, 36), *range(50, 66)], blind)
    entry = cache.add(one, 0, None, (0,))
    assert cache.add(one, 1, entry, (1,)) is not None
    other = cache.add(two, 0, None, (2,))
    assert other is not None
    assert cache.find(two, 2) == [other]
    assert cache.add(two, 1, other, (3,)) is None


def test_the_first_of_equal_blocks_stays() -> None:
    cache = PrefixCache()
    (first,) = store(cache, chain(range(16)), 1, first=5)
    assert cache.add(chain(range(16)), 0, None, (9,)) is first
    assert first.blocks == (5,)
    assert cache.at(9) is None
    assert len(cache) == 1


def test_evict_takes_the_longest_idle_first() -> None:
    cache = PrefixCache()
    (a,) = store(cache, chain(range(16)), 1, first=0)
    (b,) = store(cache, chain(range(16, 32)), 1, first=1)
    cache.rest(a)
    cache.rest(b)
    cache.wake(a)
    cache.rest(a)
    assert cache.evict() == [b]
    assert cache.evict() == [a]
    assert len(cache) == cache.idle == 0


def test_an_entry_takes_its_descendants_along() -> None:
    cache = PrefixCache()
    entries = store(cache, chain(range(48)), 3)
    cache.rest(entries[0])
    assert set(cache.evict()) == set(entries)
    assert not any(entry.alive for entry in entries)
    assert cache.find(chain(range(48)), 3) == []
    assert cache.discard(entries[1]) == []


def test_changes_are_net_and_evictions_come_first() -> None:
    cache = PrefixCache()
    (a,) = store(cache, chain(range(16)), 1)
    assert cache.take_changes().stored == (a.digest,)
    cache.discard(a)
    (again,) = store(cache, chain(range(16)), 1)  # evicted, then stored: both are told
    changes = cache.take_changes()
    assert (changes.stored, changes.evicted) == ((a.digest,), (a.digest,))
    (b,) = store(cache, chain(range(16, 32)), 1, first=1)
    cache.discard(b)  # came and went between two looks: nothing to tell
    cache.discard(again)
    changes = cache.take_changes()
    assert (changes.stored, changes.evicted) == ((), (a.digest,))


def test_check_integrity_names_what_disagrees() -> None:
    cache = PrefixCache()
    entries = store(cache, chain(range(32)), 2)
    cache.check_integrity(lambda entry: True)
    with pytest.raises(InternalError, match="counts as in use"):
        cache.check_integrity(lambda entry: False)
    entries[0].children.clear()
    with pytest.raises(InternalError, match="a parent that is gone"):
        cache.check_integrity(lambda entry: True)
    entries[0].children.add(entries[1])
    entries[1].token_ids = tuple(range(BLOCK_TOKENS - 1))
    with pytest.raises(InternalError, match="15 tokens"):
        cache.check_integrity(lambda entry: True)
    entries[1].token_ids = tuple(range(16, 32))
    entries[1].alive = False
    with pytest.raises(InternalError, match="not its own"):
        cache.check_integrity(lambda entry: True)
