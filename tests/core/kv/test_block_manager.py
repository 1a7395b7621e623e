from __future__ import annotations

import random

import pytest

from core.errors import InternalError
from core.kv.block_manager import BlockManager, BlockTable, blocks_for
from core.kv.prefix_cache import GONE, TokenChain

ROOT = b"r" * 16


def chain(start: int, count: int = 64) -> TokenChain:
    return TokenChain(ROOT, list(range(start, start + count)))


def filled(manager: BlockManager, of: TokenChain, blocks: int) -> BlockTable:
    """A table that has computed its first `blocks` blocks, cached ones taken over."""
    table = manager.new_table()
    start = manager.cache.find(of, blocks)
    manager.adopt(table, start)
    manager.grow(table, blocks - len(start))
    manager.register(table, of, 16 * blocks)
    return table


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks


def test_freed_blocks_that_are_registered_stay_usable_and_available() -> None:
    manager = BlockManager([4])
    table = filled(manager, chain(0), 3)
    held = list(table.groups[0])
    assert (manager.used, manager.available) == (3, 1)
    manager.free(table)
    assert (manager.used, manager.available, manager.cache.idle) == (0, 4, 3)
    again = manager.new_table()
    manager.adopt(again, manager.cache.find(chain(0), 3))
    assert again.groups[0] == held
    assert (manager.used, manager.available, manager.cache.idle) == (3, 1, 0)
    manager.check_integrity([again])


def test_shared_blocks_are_free_only_when_the_last_holder_goes() -> None:
    manager = BlockManager([4])
    one, two = filled(manager, chain(0), 2), filled(manager, chain(0), 2)
    assert one.groups == two.groups
    assert manager.used == 2
    manager.free(one)
    assert manager.used == 2
    manager.check_integrity([one, two])
    manager.free(two)
    assert manager.used == 0
    manager.check_integrity([])


def test_eviction_begins_with_the_ends_of_chains() -> None:
    manager = BlockManager([4])
    manager.free(filled(manager, chain(0), 3))
    taken = manager.new_table()
    manager.grow(taken, 2)  # one free block, then the end of the chain
    assert len(manager.cache.find(chain(0), 3)) == 2
    manager.check_integrity([taken])


def test_fits_counts_idle_blocks_of_the_start_once() -> None:
    manager = BlockManager([4])
    manager.free(filled(manager, chain(0), 3))
    start = manager.cache.find(chain(0), 3)
    assert manager.fits(start, 4)
    assert not manager.fits(start, 4, spare=1)
    assert manager.fits([], 4)
    assert not manager.fits(start, 5)


def test_grow_beyond_what_is_available_is_refused_without_a_change() -> None:
    manager = BlockManager([3])
    table = manager.new_table()
    with pytest.raises(InternalError, match="4 blocks were asked for, 3 are available"):
        manager.grow(table, 4)
    assert len(table) == 0
    manager.check_integrity([table])


def test_a_table_computed_beside_the_cached_one_keeps_its_blocks_and_goes_on() -> None:
    """Two sequences compute the same block at once: one entry, and both chains continue."""
    manager = BlockManager([8])
    one, two = manager.new_table(), manager.new_table()
    for table in (one, two):
        manager.grow(table, 2)
    manager.register(one, chain(0), 16)
    manager.register(two, chain(0), 32)
    assert len(manager.cache) == 2
    assert [e.blocks[0] for e in manager.cache.find(chain(0), 2)] == [
        one.groups[0][0], two.groups[0][1],
    ]  # fmt: skip
    manager.check_integrity([one, two])
    manager.free(two)  # its first block was never registered: free, its second one idle
    manager.check_integrity([one])
    manager.free(one)
    manager.check_integrity([])
    assert manager.available == 8


def test_a_chain_whose_start_was_evicted_is_offered_again_from_its_own_blocks() -> None:
    manager = BlockManager([4])
    one, two = manager.new_table(), manager.new_table()
    manager.grow(one, 1)
    manager.grow(two, 3)
    manager.register(one, chain(0), 16)
    manager.register(two, chain(0), 32)
    manager.free(one)
    filler = manager.new_table()
    manager.grow(filler, 1)  # evicts block 0 of the chain and, with it, block 1, which is held
    assert manager.cache.find(chain(0), 2) == []
    manager.check_integrity([two, filler])
    manager.register(two, chain(0), 48)
    assert [e.blocks[0] for e in manager.cache.find(chain(0), 3)] == two.groups[0]
    manager.check_integrity([two, filler])


def test_distrusted_blocks_are_offered_to_nobody() -> None:
    manager = BlockManager([4])
    table = filled(manager, chain(0), 2)
    manager.distrust(table)
    assert manager.cache.find(chain(0), 2) == []
    manager.free(table)
    manager.check_integrity([])
    assert manager.cache.idle == 0


def test_groups_have_their_own_pools_and_share_one_entry() -> None:
    manager = BlockManager([6, 3])
    assert manager.total == 3
    table = filled(manager, chain(0), 2)
    other = manager.new_table()
    manager.grow(other, 1)
    assert manager.available == 0
    manager.free(table)
    manager.grow(other, 2)  # group 1 has to evict, group 0 has room
    manager.check_integrity([other])
    assert manager.cache.idle == 0
    assert len(set(other.groups[1])) == 3


# ------------------------------------------------------------------ windows


def windowed(blocks: int = 12, window: int = 20, window_blocks: int = 6) -> BlockManager:
    return BlockManager([blocks, window_blocks], [None, window])


def computed(manager: BlockManager, of: TokenChain, blocks: int) -> BlockTable:
    """As `filled`, block after block, forgetting what the window has passed."""
    table = manager.new_table()
    start = manager.usable(manager.cache.find(of, blocks))
    manager.adopt(table, start)
    manager.grow(table, blocks - len(start))
    for end in range(16 * len(start) + 16, 16 * blocks + 1, 16):
        assert manager.reach(table, end) == end
        manager.register(table, of, end)
        manager.forget(table, end)
    return table


def test_a_window_group_keeps_what_the_next_token_sees_and_no_more() -> None:
    manager = windowed()
    table = computed(manager, chain(0, 200), 5)
    assert table.passed == [0, 3]  # position 80 sees 61 … 80: blocks 3 and 4
    assert [len(group) for group in table.groups] == [5, 5]
    assert table.view(80)[1][:3] == (0, 0, 0)
    manager.check_integrity([table])
    manager.forget(table, 70)  # never back
    assert table.passed == [0, 3]
    manager.free(table)
    manager.check_integrity([])
    assert manager.available == 12


def test_long_sequences_fit_a_window_group_that_is_shorter_than_they_are() -> None:
    manager = windowed(window_blocks=3)
    table = computed(manager, chain(0, 200), 12)
    manager.check_integrity([table])
    with pytest.raises(InternalError, match="its window of 40 tokens needs 4"):
        windowed(window=40, window_blocks=3)


def test_a_cached_start_counts_only_as_far_as_every_group_has_what_is_seen_next() -> None:
    manager = windowed(window_blocks=6)
    manager.free(computed(manager, chain(0, 200), 5))
    cached = manager.cache.find(chain(0, 200), 5)
    assert len(manager.usable(cached)) == len(cached) == 5
    other = computed(manager, chain(1000, 200), 3)  # takes idle blocks of the window group
    lost = [n for n, entry in enumerate(cached) if entry.blocks[1] == GONE]
    assert lost
    usable = len(manager.usable(cached))
    assert all(entry.blocks[1] != GONE for entry in cached[max(0, usable * 16 - 19) // 16 : usable])
    again = computed(manager, chain(0, 200), 5)
    manager.check_integrity([other, again])


def test_what_is_set_aside_for_a_peer_is_what_the_last_token_sees() -> None:
    manager = windowed()
    table = manager.new_table()
    manager.grow(table, 5)
    assert manager.reserve_windows(table, 79)
    assert table.passed == [0, 3]
    assert len(table.groups[1]) == 5
    assert manager.sees(table, 79)
    assert not manager.sees(table, 0)
    manager.check_integrity([table])


def test_random_use_with_windows_keeps_the_books_straight() -> None:
    dice = random.Random(11)
    manager = windowed(blocks=14, window=dice.choice((3, 20)), window_blocks=7)
    tables: list[BlockTable] = []
    partly = 0
    for _ in range(1500):
        if tables and dice.random() < 0.5:
            manager.free(tables.pop(dice.randrange(len(tables))))
        else:
            of = chain(1000 * dice.randrange(3), 200)
            count = dice.randrange(1, 5)
            cached = manager.cache.find(of, count)
            start = manager.usable(cached)
            partly += len(start) < len(cached)
            if manager.fits(start, count) and len(tables) < 2:
                tables.append(computed(manager, of, count))
        if tables and dice.random() < 0.05:
            manager.distrust(dice.choice(tables))
        manager.check_integrity(tables)
    assert partly > 20


def test_check_integrity_names_what_disagrees() -> None:
    manager = BlockManager([4])
    table = filled(manager, chain(0), 2)
    with pytest.raises(InternalError, match="1 references and 0 holders"):
        manager.check_integrity([])
    with pytest.raises(InternalError, match="1 references and 2 holders"):
        manager.check_integrity([table, table])
    lost = manager.free_blocks[0].take(b"")
    with pytest.raises(InternalError, match=f"block {lost} of group 0 is 0× free, 0× idle"):
        manager.check_integrity([table])
    manager.free_blocks[0].give(lost)
    manager.free_blocks[0].give(lost)
    with pytest.raises(InternalError, match=f"block {lost} of group 0 is 2× free"):
        manager.check_integrity([table])


def test_random_use_keeps_the_books_straight() -> None:
    dice = random.Random(7)
    manager = BlockManager([9, 7])
    tables: list[BlockTable] = []
    evictions = 0
    for _ in range(3000):
        if tables and dice.random() < 0.5:
            manager.free(tables.pop(dice.randrange(len(tables))))
        else:
            of = chain(1000 * dice.randrange(4))
            count = dice.randrange(1, 4)
            start = manager.cache.find(of, count)
            if manager.fits(start, count):
                tables.append(filled(manager, of, count))
        if tables and dice.random() < 0.05:
            manager.distrust(dice.choice(tables))
        evictions += len(manager.take_changes().evicted)
        manager.check_integrity(tables)
    assert evictions > 50
    for table in tables:
        manager.free(table)
    assert manager.available == 7
    assert manager.used == 0
