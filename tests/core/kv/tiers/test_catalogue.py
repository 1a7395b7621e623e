"""Which blocks stay, which go, and when loading pays."""

from __future__ import annotations

from core.kv.geometry import KVGeometry, KVGroup
from core.kv.tiers.catalogue import Catalogue, Kept, Placed, Wanted
from core.kv.tiers.entry import Entry
from core.kv.tiers.pays import FIRST_GUESS_BYTES_PER_S, LoadRate, pays
from core.kv.tiers.shape import Part, Shape
from tests.core.kv.tiers.made import GEOMETRY, SHAPE, chain, digests, ids


def wanted(entry: Entry) -> Wanted:
    return Wanted(entry.digest, entry.parent, entry.token_ids)


def test_the_least_recently_used_goes_and_of_a_chain_the_end_first() -> None:
    catalogue = Catalogue(3)
    blocks = chain(3)
    for entry, _ in blocks:
        assert catalogue.add(entry) is not None
    catalogue.touch(digests(blocks))
    others = chain(2, "other")
    first, second = (catalogue.add(entry) for entry, _ in others)
    assert first == Placed(2, blocks[2][0])
    assert second == Placed(1, blocks[1][0])
    assert list(catalogue.digests()) == [blocks[0][0].digest, *digests(others)]
    assert catalogue.add(others[0][0]) is None


def test_a_run_ends_where_the_hash_or_the_content_differs() -> None:
    catalogue = Catalogue(4)
    blocks = [entry for entry, _ in chain(3)]
    for entry in blocks:
        catalogue.add(entry)
    asked = [wanted(entry) for entry in blocks]
    assert [one.entry for one in catalogue.run(asked)] == blocks
    collision = asked[1]._replace(token_ids=ids(77))
    assert len(catalogue.run([asked[0], collision, asked[2]])) == 1
    assert len(catalogue.run([asked[0], asked[1]._replace(parent=b"?" * 16)])) == 1
    catalogue.drop(blocks[0].digest)
    assert catalogue.run(asked) == []
    assert len(catalogue.run(asked[1:])) == 2


def test_after_a_restart_the_free_slots_are_those_that_nobody_has() -> None:
    one, two = (entry for entry, _ in chain(2))
    catalogue = Catalogue(3)
    catalogue.restore([Kept(0, one), Kept(2, two), Kept(1, one)])
    assert catalogue.get(one.digest) == Kept(1, one)
    free = chain(1, "x")[0][0]
    assert catalogue.add(free) == Placed(0, None)
    assert catalogue.add(chain(1, "y")[0][0]) == Placed(2, two)  # the oldest of those restored


def test_what_is_of_one_owner_is_found() -> None:
    catalogue = Catalogue(8)
    ours, theirs = chain(2, "a"), chain(3, "b")
    for entry, _ in (*ours, *theirs):
        catalogue.add(entry)
    assert [one.entry for one in catalogue.of_owner(theirs[0][0].owner)] == [e for e, _ in theirs]


def test_no_slots_keep_nothing() -> None:
    assert Catalogue(0).add(chain(1)[0][0]) is None


def test_loading_pays_where_it_is_quicker() -> None:
    assert pays(100, 36 << 20, 500e6, 1000.0)  # 0.08 s against 1.6 s
    assert not pays(100, 36 << 20, 10e6, 1000.0)  # 3.8 s
    assert not pays(1, 360 << 10, 500e6, 100_000.0)  # what it takes at the least is too much
    assert not pays(0, 0, 500e6, 1000.0)
    assert pays(1, 360 << 10, 500e6, 0.0)  # nobody has measured


def test_a_slow_tier_is_tried_again_after_a_while() -> None:
    rate = LoadRate()
    for _ in range(20):
        rate.note(1_000_000, 1.0)
    assert rate.bytes_per_s < 2e6
    for _ in range(500):
        rate.left_alone()
    assert rate.bytes_per_s == FIRST_GUESS_BYTES_PER_S
    rate.note(1 << 30, 0.1)
    assert rate.bytes_per_s > FIRST_GUESS_BYTES_PER_S


def test_a_shape_names_each_ranks_share() -> None:
    assert [part.size for part in SHAPE.parts] == [2048, 512]
    assert SHAPE.block_bytes == 2560
    assert list(SHAPE.spans(0b10)) == [(Part(0, 1, 512), 0, 512)]
    assert SHAPE.size(0b01) == 2048
    two = Shape.of(b"m", {0: GEOMETRY, 1: GEOMETRY})
    assert [(part.rank, part.group) for part in two.parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [start for _, start, _ in two.spans(0b11)] == [0, 2048, 2560, 4608]


def test_another_model_or_split_is_another_shape() -> None:
    half = KVGeometry(
        groups=(KVGroup(name="full", layers=1, kv_heads=1, head_dim=8, dtype="float32"),),
        blocks=(64,),
    )
    larger = KVGeometry(groups=GEOMETRY.groups, blocks=(128, 128))
    digest = Shape.of(b"m", {0: GEOMETRY}).digest
    assert Shape.of(b"n", {0: GEOMETRY}).digest != digest
    assert Shape.of(b"m", {0: half}).digest != digest
    assert Shape.of(b"m", {0: larger}).digest == digest  # how many blocks there are is no matter
