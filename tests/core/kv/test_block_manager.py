from __future__ import annotations

import random

import pytest

from core.errors import InternalError
from core.kv.block_manager import BlockManager, BlockTable, blocks_for
from core.kv.prefix_cache import TokenChain

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


def test_check_integrity_names_what_disagrees() -> None:
    manager = BlockManager([4])
    table = filled(manager, chain(0), 2)
    with pytest.raises(InternalError, match="1 references and 0 holders"):
        manager.check_integrity([])
    with pytest.raises(InternalError, match="1 references and 2 holders"):
        manager.check_integrity([table, table])
    lost = manager._free[0].pop()
    with pytest.raises(InternalError, match=f"block {lost} of group 0 is 0× free, 0× idle"):
        manager.check_integrity([table])
    manager._free[0].extend([lost, lost])
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
