"""Parallel plans: ranks and their places, what divides and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.parallel import Hosts, ModelNumbers, Place, Plan, kv_slice, refusal

SMOLLM2 = ModelNumbers(layers=30, heads=9, kv_heads=3, intermediate=1536, vocab_size=49152)


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(tp=3), Plan(pp=4), Plan(tp=2, pp=3, dp_attention=2, ep=4)]
)
def test_every_rank_has_one_place_and_every_pool_its_leader(plan: Plan) -> None:
    places = [plan.place(rank) for rank in range(plan.ranks)]
    assert len(set(places)) == plan.ranks == plan.tp * plan.pp * plan.dp_attention
    assert [plan.rank(place) for place in places] == list(range(plan.ranks))
    members = [plan.members(dp) for dp in range(plan.dp_attention)]
    assert sorted(rank for pool in members for rank in pool) == list(range(plan.ranks))
    for dp, pool in enumerate(members):
        assert plan.leader(dp) == pool[0]
        assert plan.place(pool[0]) == Place(0, dp, 0)


def test_the_bundled_model_divides_by_1_3_and_9() -> None:
    fits = [tp for tp in range(1, 13) if refusal(Plan(tp=tp), SMOLLM2) is None]
    assert fits == [1, 3, 9]
    assert refusal(Plan(tp=2), SMOLLM2) == (
        "tp 2 does not divide 9 query and 3 KV heads; these do: 1, 3, 9"
    )


def test_a_split_beyond_the_kv_heads_copies_them_or_is_refused() -> None:
    """B18: eight query and two KV heads; twelve and three."""
    eight, twelve = replace(SMOLLM2, heads=8, kv_heads=2), replace(SMOLLM2, heads=12, kv_heads=3)
    assert [tp for tp in range(1, 9) if refusal(Plan(tp=tp), eight) is None] == [1, 2, 4, 8]
    assert refusal(Plan(tp=2), twelve) == (
        "tp 2 does not divide 12 query and 3 KV heads; these do: 1, 3, 6, 12"
    )


@pytest.mark.parametrize(
    ("plan", "numbers", "says"),
    [
        (Plan(pp=31), SMOLLM2, "pp 31 is more than the 30 layers"),
        (Plan(tp=3, ep=3), SMOLLM2, "ep 3 needs experts, and the model has none"),
        (
            Plan(tp=3, ep=2),
            None,
            "ep 2 does not divide the ranks of a stage, which are 3 (tp 3 × dp_",
        ),
        (Plan(tp=3, ep=3), replace(SMOLLM2, experts=8), "ep 3 does not divide 8 experts"),
        (Plan(tp=3), replace(SMOLLM2, intermediate=2), "tp 3 is more than the 2 columns"),
        (Plan(tp=6), replace(SMOLLM2, heads=12, kv_heads=4), "these do: 1, 2, 4, 12"),
    ],
)
def test_what_does_not_divide_is_told_with_its_numbers(
    plan: Plan, numbers: ModelNumbers | None, says: str
) -> None:
    why = refusal(plan, numbers)
    assert why is not None
    assert says in why


def test_latent_kv_has_no_heads_to_divide() -> None:
    latent = replace(SMOLLM2, heads=16, kv_heads=1, latent=True)
    assert refusal(Plan(tp=8), latent) is None
    assert {kv_slice(latent, Plan(tp=8), rank) for rank in range(8)} == {(0, 1)}


@pytest.mark.parametrize(("kv_heads", "tp"), [(8, 1), (8, 2), (8, 8), (3, 9), (1, 4)])
def test_kv_heads_are_shared_out_or_copied_evenly(kv_heads: int, tp: int) -> None:
    numbers = replace(SMOLLM2, heads=72, kv_heads=kv_heads)
    held = [kv_slice(numbers, Plan(tp=tp), rank) for rank in range(tp)]
    heads = [head for first, count in held for head in range(first, first + count)]
    assert heads == sorted(heads)
    assert {heads.count(head) for head in range(kv_heads)} == {max(1, tp // kv_heads)}


def test_hosts_take_equal_runs_of_ranks() -> None:
    plan = Plan(tp=2, pp=2)
    assert [list(Hosts(n, 2).ranks(plan)) for n in (0, 1)] == [[0, 1], [2, 3]]


def test_a_plan_reads_as_its_degrees() -> None:
    assert str(Plan()) == "1 rank"
    assert str(Plan(tp=3, dp_attention=2)) == "tp 3 × dp_attention 2"
