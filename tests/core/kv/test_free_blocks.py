"""Blocks of a condemned chain stay out of use until they are scrubbed."""

from __future__ import annotations

import random

from core.kv.block_manager import BlockManager, BlockTable
from core.kv.prefix_cache import TokenChain

OURS, THEIRS = b"o" * 16, b"t" * 16


def filled(manager: BlockManager, root: bytes, start: int, blocks: int) -> BlockTable:
    """A table whose first `blocks` are registered, with one more that is not full."""
    of = TokenChain(root, list(range(start, start + 16 * blocks + 8)))
    table = manager.new_table(root)
    known = manager.usable(manager.cache.find(of, blocks))
    manager.adopt(table, known)
    manager.grow(table, blocks + 1 - len(known))
    manager.reach(table, 16 * blocks + 8)
    manager.register(table, of, 16 * blocks)
    return table


def waiting(manager: BlockManager, root: bytes) -> list[list[int]]:
    return [sorted(free.waiting(root)) for free in manager.free_blocks]


def test_cached_free_and_held_blocks_of_a_root_come_out_of_use_and_no_others() -> None:
    manager = BlockManager([12])
    gone = filled(manager, THEIRS, 0, 2)
    ours = filled(manager, OURS, 0, 2)
    held = filled(manager, THEIRS, 500, 1)
    expected = sorted([*gone.groups[0], *held.groups[0]])
    manager.free(gone)  # two cached, one free with residue
    assert manager.condemn(THEIRS) == 3
    assert waiting(manager, THEIRS) == [sorted(set(expected) - set(held.groups[0]))]
    assert manager.free_blocks[0].out(THEIRS) == 2
    manager.check_integrity([ours, held])
    manager.free(held)
    assert manager.free_blocks[0].out(THEIRS) == 0
    assert waiting(manager, THEIRS) == [expected]
    assert len(manager.cache) == 2
    assert manager.available == 12 - 3 - 5
    manager.check_integrity([ours])
    for free in manager.free_blocks:
        free.scrubbed(THEIRS)
    assert manager.available == 9
    assert waiting(manager, THEIRS) == [[]]
    manager.check_integrity([ours])


def test_what_still_runs_registers_none_of_its_condemned_blocks_again() -> None:
    manager = BlockManager([12])
    table = filled(manager, THEIRS, 0, 2)
    manager.condemn(THEIRS)
    manager.register(table, TokenChain(THEIRS, list(range(40))), 32)
    assert len(manager.cache) == 0
    manager.free(table)
    again = filled(manager, THEIRS, 0, 2)  # a new request computes it anew
    assert len(manager.cache) == 2
    assert not set(again.groups[0]) & set(waiting(manager, THEIRS)[0])


def test_blocks_that_changed_hands_are_the_new_owners() -> None:
    manager = BlockManager([3])
    manager.free(filled(manager, THEIRS, 0, 2))
    table = filled(manager, OURS, 0, 2)  # takes all three
    assert manager.condemn(THEIRS) == 0
    assert waiting(manager, THEIRS) == [[]]
    manager.check_integrity([table])


def test_random_use_with_windows_and_purges_keeps_the_books_straight() -> None:
    dice = random.Random(11)
    manager = BlockManager([14, 11], [None, 32])
    tables: list[BlockTable] = []
    purges = 0
    for _ in range(2000):
        turn = dice.random()
        if tables and turn < 0.5:
            manager.free(tables.pop(dice.randrange(len(tables))))
        elif turn < 0.9:
            root, blocks = dice.choice([OURS, THEIRS]), dice.randrange(1, 4)
            if manager.fits([], blocks + 1, spare=2):
                tables.append(filled(manager, root, 1000 * dice.randrange(3), blocks))
        elif turn < 0.95:
            root = dice.choice([OURS, THEIRS])
            manager.condemn(root)
            assert all(entry.root != root for entry in manager.cache.entries())
            purges += 1
        else:
            for free in manager.free_blocks:
                free.scrubbed(dice.choice([OURS, THEIRS]))
        manager.check_integrity(tables)
    for table in tables:
        manager.free(table)
    for root in (OURS, THEIRS):
        for free in manager.free_blocks:
            free.scrubbed(root)
    assert manager.available == 14
    assert purges > 50
