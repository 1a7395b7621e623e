"""Who gets which blocks: the prefix cache, preemption, reservations, prefills."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from core.engine.messages import GivenBack
from core.engine.scheduler import Scheduler
from tests.core.engine.harness import Front, rank_config, solo, spec
from tests.core.engine.stepping import A, B, C, D, answer, refused, reserve, scheduler, shape, step


@pytest.fixture
def front() -> Iterator[Front]:
    one = Front(rank_config(blocks=40))
    yield one
    one.close()


# ------------------------------------------------------------------ the prefix cache


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_a_prompt_cached_to_the_last_token_computes_that_token(front: Front, length: int) -> None:
    """B15: cold, warm, warm, then longer; one text, cached counts exact, nothing left behind."""
    prompt = [100 + i for i in range(length)]
    most = (length - 1) // 16 * 16
    for name, cached in (("cold", 0), ("warm", most), ("again", most)):
        watched = front.run(name, spec(prompt))
        front.finish_all()
        assert watched.computed == length - cached
        assert front.stats.blocks_used == 0
    longer = front.run("longer", spec([*prompt, 7, 8, 9]))
    front.finish_all()
    assert longer.computed == length + 3 - (length // 16 * 16)  # every full block, also the last
    assert front.stats.cached_prompt_tokens == 2 * most + length // 16 * 16


def test_an_answer_is_cached_for_the_next_turn(front: Front) -> None:
    first = front.run("first", spec(range(100, 120), max_tokens=30))
    front.finish_all()
    conversation = [*range(100, 120), *first.tokens]
    second = front.run("second", spec([*conversation, 5, 6]))
    front.finish_all()
    computed = len(conversation) - 1  # the last sampled token was never computed
    assert second.computed == len(conversation) + 2 - computed // 16 * 16


def test_namespaces_share_nothing(front: Front) -> None:
    for name, namespace, computed in (("a", "", 40), ("b", "x", 40), ("c", "x", 8)):
        watched = front.run(name, spec(range(100, 140), namespace=namespace))
        front.finish_all()
        assert watched.computed == computed


# ------------------------------------------------------------------ preemption


def test_sequences_that_were_pushed_out_of_memory_come_back_right() -> None:
    """B16: a pool of 12 blocks, 6 streams that each grow to 8."""
    front = Front(rank_config(blocks=12, repeat=True))
    try:
        for n in range(6):
            front.run(f"s{n}", spec(range(100 * n + 10, 100 * n + 30), max_tokens=108))
        front.finish_all()
        assert front.stats.preemptions > 0
        for n in range(6):
            watched = front.all[f"s{n}"]
            text, finish = solo(watched.spec, context=front.context, repeat=True)
            assert (watched.tokens, watched.finish) == (text, finish)
            assert watched.computed == 20
        assert front.stats.generated_tokens == 6 * 108
        assert front.stats.computed_prompt_tokens == 6 * 20  # recomputed ones not once more
        assert front.stats.cached_prompt_tokens == 0  # nor are they hits
    finally:
        front.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_that_are_given_back_go_on_from_their_output(depth: int) -> None:
    """B16 over two nodes: what one has no room for goes on at the other, which is given the output
    so far. Nothing is said twice or left out, and nobody keeps a block."""
    home = Front(rank_config(blocks=12, repeat=True), depth=depth)
    away = Front(rank_config(blocks=60, repeat=True), depth=depth)
    try:
        for n in range(6):
            wanted = spec(range(100 * n + 10, 100 * n + 30), max_tokens=108, move=32)
            home.run(f"s{n}", wanted)
        home.finish_all()
        moved = home.named("moved")
        assert 0 < len(moved) < 6
        assert home.stats.preemptions >= len(moved)
        for name in moved:
            before = home.all[name]
            assert len(before.tokens) >= 10, "it held two blocks at the least"
            away.reserve(name, msgspec.structs.replace(
                before.spec, output_ids=tuple(before.tokens), move_min_tokens=0
            ))  # fmt: skip
        away.finish_all()
        for name, one in home.all.items():
            rest = away.all[name].tokens if name in moved else []
            text, _ = solo(one.spec, context=home.context, repeat=True)
            assert one.tokens + rest == text
            assert one.computed == 20, "read once, also where the output came before the move"
    finally:
        home.close()
        away.close()


def parting(of: Scheduler) -> GivenBack:
    """Three sequences fill the pool, and the last one has to give way."""
    of.run(A, spec(range(30)))
    of.run(B, spec(range(100, 130), move=1, keep=True))
    of.run(C, spec(range(200, 230), move=1, keep=True))
    while plan := of.plan():
        of.apply(answer(plan))
    (given,) = of.take().given_back
    return given


def test_one_that_parts_keeps_its_blocks_until_they_are_copied() -> None:
    """Nobody else loses any meanwhile: what is coming may be enough."""
    of = scheduler(blocks=7)
    given = parting(of)
    assert (given.sequence, given.tokens) == (C, 16 * len(given.blocks[0]))
    assert given.tokens > 0
    assert of.blocks.used == 7
    assert of.plan() is None
    assert not of.take().given_back
    of.release(C)
    assert C not in of.roster
    assert [row.sequence for row in step(of).rows] == [A, B]


def test_one_that_parts_may_be_aborted() -> None:
    of = scheduler(blocks=7)
    parting(of)
    of.abort(C)
    of.release(C)  # the front says it whatever has happened
    of.roster.check_integrity()
    assert of.blocks.used == 5


def test_what_costs_little_to_compute_again_is_not_given_back() -> None:
    """The threshold counts what is lost: blocks that others hold too are not."""
    of = scheduler(blocks=7)
    shared = range(32)
    of.run(A, spec([*shared, 1]))
    step(of)
    of.run(B, spec([*shared, 2], move=17))
    of.run(C, spec(range(200, 231), move=17))
    for _ in range(40):
        step(of)
    gone = [one.sequence for one in of.take().given_back]
    assert gone == [C], "two blocks of its own"
    assert B in of.roster


def test_it_says_how_far_into_its_prompt_it_came() -> None:
    """What it found in the cache counts: an answer that goes on elsewhere is charged by it."""
    of = scheduler(blocks=7)
    shared = range(32)
    of.run(A, spec([*shared, 1]))
    step(of)
    of.run(C, spec([*shared, *range(200, 240)], move=1))
    for _ in range(60):
        step(of)
    (given,) = of.take().given_back
    assert (given.sequence, given.computed_tokens, given.read_tokens) == (C, 40, 72)


def test_the_last_in_order_of_service_loses_its_blocks_and_the_first_goes_on() -> None:
    of = scheduler(blocks=7)
    of.run(A, spec(range(31)))
    of.run(B, spec(range(100, 131), priority=1))
    of.run(C, spec(range(200, 231)))
    step(of)
    step(of)
    assert [one.id for one in of.roster.running] == [A, C, B]
    plan = step(of)  # A, C and B each need a third block; one is free, B's two go to C
    assert [row.sequence for row in plan.rows] == [A, C]
    assert of.counters.preemptions == 1
    assert [one.id for one in of.roster.waiting] == [B]


def test_a_sequence_waits_rather_than_take_from_those_before_it() -> None:
    of = scheduler(blocks=5)
    of.run(A, spec(range(31)))
    of.run(B, spec(range(100, 131)))
    step(of)
    step(of)
    plan = step(of)
    assert [row.sequence for row in plan.rows] == [A]
    assert of.counters.preemptions == 0
    of.abort(A)
    assert shape(step(of)) == [(B, 32, 33, True)]  # nothing was lost, nothing is computed again


# ------------------------------------------------------------------ reservations


def test_a_reservation_names_the_missing_blocks_of_all_but_the_last_token() -> None:
    of = scheduler()
    of.run(A, spec(range(40), max_tokens=1))
    step(of)
    of.take()
    reply = reserve(of, B, spec(range(60)))
    assert reply.cached_tokens == 32
    assert sorted(reply.fill[0]) == [2, 3]
    assert len(reserve(of, C, spec(range(500, 517))).fill[0]) == 1
    assert reserve(of, D, spec([1])).fill == ({},)


def test_begin_computes_the_last_token_only_and_shares_what_came() -> None:
    of = scheduler()
    reserve(of, A, spec(range(49)))
    of.begin(A, kv_in_place=True)
    assert len(of.blocks.take_changes().stored) == 3
    assert shape(step(of)) == [(A, 48, 49, True)]
    assert of.take().outputs[0].computed_tokens == 1
    of.run(B, spec(range(49)))
    assert shape(step(of))[1] == (B, 48, 49, True)


def test_begin_without_kv_computes_the_prompt_here() -> None:
    of = scheduler()
    reserve(of, A, spec(range(33)))
    of.begin(A, kv_in_place=False)
    assert shape(step(of)) == [(A, 0, 33, True)]  # the last token in a block of its own
    assert of.take().outputs[0].computed_tokens == 33


def test_blocks_that_are_being_filled_are_matched_by_nobody() -> None:
    of = scheduler()
    reserve(of, A, spec(range(40)))
    of.run(B, spec(range(40)))
    assert shape(step(of)) == [(B, 0, 40, True)]
    assert reserve(of, C, spec(range(40))).cached_tokens == 32  # B's


def test_a_reservation_leaves_a_watermark_and_takes_nothing_from_others() -> None:
    of = scheduler(blocks=8)
    of.run(A, spec(range(31)))
    step(of)
    of.take()
    of.reserve(B, spec(range(100, 197)))  # 6 blocks, 6 free: none would be left for A's growth
    assert refused(of)[0] == "no_capacity"
    assert of.counters.preemptions == 0
    assert len(reserve(of, C, spec(range(100, 181))).fill[0]) == 5
    step(of)
    of.roster.check_integrity()


def test_a_reservation_does_not_jump_the_queue() -> None:
    of = scheduler(blocks=8)
    of.run(A, spec(range(64)))
    step(of)
    of.run(B, spec(range(100, 164)))  # waits for memory
    step(of)
    of.take()
    of.reserve(C, spec(range(200, 217)))
    assert refused(of)[0] == "no_capacity"
    assert len(reserve(of, D, spec(range(200, 217), priority=-1)).fill[0]) == 1


def test_reserved_blocks_are_not_taken_for_growth_and_come_back_on_abort() -> None:
    of = scheduler(blocks=4)
    of.run(A, spec(range(15)))
    step(of)
    reserve(of, B, spec(range(100, 133)))
    step(of)
    step(of)  # A takes the last block at its 17th token
    for _ in range(15):
        step(of)
    assert of.plan() is None  # A waits, B keeps what a peer is writing into
    of.abort(B)
    assert shape(step(of)) == [(A, 32, 33, True)]


def test_slots_and_blocks_cannot_wait_for_each_other() -> None:
    """One has the only slot and needs a block, one before it has the blocks and needs the slot."""
    of = scheduler(blocks=4, sequences=1)
    reserve(of, A, spec(range(100, 133), max_tokens=1))
    of.run(B, spec(range(16), priority=1))
    step(of)
    of.begin(A, kv_in_place=True)
    plan = step(of)
    while plan.rows[0].sequence == B:
        plan = step(of)
    assert shape(plan) == [(A, 32, 33, True)]


# ------------------------------------------------------------------ prefills


def test_a_prefill_reports_whole_chunks_holds_its_blocks_and_lets_go(front: Front) -> None:
    front.prefill("p", spec(range(100, 201)))
    front.step()
    assert front.named("queued") == ["p"]
    assert front.stats.prefill_backlog_tokens == 100 - 64
    front.step()
    assert front.named("held") == ["p"]
    assert front.stats.prefill_backlog_tokens == 0
    assert front.stats.blocks_used == 7
    assert not front.step()
    front.release("p")
    assert front.stats.blocks_used == 0
    assert front.stats.blocks_cached == 6


def test_a_prefill_that_is_cached_is_told_what_is_ready_before_it_computes() -> None:
    of = scheduler()
    of.run(A, spec(range(80), max_tokens=1))
    step(of)
    step(of)
    of.take()
    of.prefill(B, spec(range(65)))
    assert of.plan() is None  # 64 of 64 are there
    (progress,) = of.take().progress
    assert (progress.ready_tokens, progress.computed_tokens, progress.complete) == (64, 0, True)
    of.prefill(C, spec(range(79)))
    step(of)
    assert [(p.ready_tokens, p.complete) for p in of.take().progress] == [(64, False), (78, True)]


def test_a_prefill_of_one_token_has_nothing_to_do() -> None:
    of = scheduler()
    of.prefill(A, spec([7]))
    assert of.plan() is None
    (progress,) = of.take().progress
    assert (progress.ready_tokens, progress.complete, progress.blocks) == (0, True, ((),))
    of.release(A)
    of.roster.check_integrity()


def test_a_prefill_can_be_released_before_it_is_complete() -> None:
    of = scheduler(step_tokens=16)
    of.prefill(A, spec(range(64)))
    step(of)
    of.release(A)
    assert of.plan() is None
    assert of.blocks.used == 0


def test_a_prefill_is_nobodys_victim_while_it_computes() -> None:
    """Its blocks have been told to the front, which may be sending them."""
    of = scheduler(blocks=6, step_tokens=2)
    of.run(A, spec(range(15)))
    while not of.take().outputs:
        step(of)
    of.prefill(B, spec(range(100, 165)))  # 4 blocks; the last one is for A's growth
    plan = step(of)
    while len(plan.rows) == 2:
        plan = step(of)
    assert [row.sequence for row in plan.rows] == [B]  # A, though first, waits for a third block
    assert of.roster.running[0].table.capacity == 32
    assert of.counters.preemptions == 0
    told = of.take().progress
    assert 0 < told[-1].ready_tokens < 64
    assert len({one.blocks for one in told}) == 1
    of.release(B)
    assert shape(step(of)) == [(A, 32, 33, True)]
