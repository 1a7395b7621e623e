"""What each rank keeps: everything exactly once, or copied as stated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from core.models.config import Latent, ModelConfig, Moe
from core.models.parallel import UNIT, Shard, balanced, check, estimated_stages, shard, split
from core.parallel import Plan

SMOLLM2 = ModelConfig(
    family="llama", vocab_size=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64,
    intermediate=1536, context=8192, norm_eps=1e-5, rope_theta=100000.0, tied=True,
)  # fmt: skip


@given(st.integers(1, 5000), st.integers(1, 16), st.sampled_from([1, UNIT, 256]))
def test_a_split_keeps_everything_once_and_in_order(total: int, parts: int, unit: int) -> None:
    shares = split(total, parts, unit)
    assert len(shares) == parts
    assert [n for share in shares for n in share] == list(range(total))
    sizes = [len(share) for share in shares]
    whole = unit if -(-total // unit) >= parts else 1
    assert max(sizes) - min(sizes) <= 2 * whole
    assert all(share.start % whole == 0 for share in shares)
    assert total < parts or min(sizes) > 0


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=8),
    st.integers(1, 4),
    st.floats(0, 20),
    st.floats(0, 20),
)
def test_no_other_stages_have_a_cheaper_dearest(
    costs: list[float], parts: int, before: float, after: float
) -> None:
    parts = min(parts, len(costs))
    runs = balanced(costs, parts, before=before, after=after)
    assert [layer for run in runs for layer in run] == list(range(len(costs)))
    assert all(runs)

    def dearest(edges: tuple[int, ...]) -> float:
        stages = [sum(costs[first:last]) for first, last in itertools.pairwise(edges)]
        stages[0] += before
        stages[-1] += after
        return max(stages)

    best = min(
        dearest((0, *inner, len(costs)))
        for inner in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert dearest((0, *(run.stop for run in runs))) == pytest.approx(best)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 4))
    moe = None
    if draw(st.booleans()):
        groups = draw(st.integers(1, 2))
        moe = Moe(
            layers=(1,), count=groups * draw(st.integers(2, 6)), chosen=2,
            width=draw(st.integers(16, 200)), shared_width=draw(st.sampled_from([0, 48])),
        )  # fmt: skip
    latent = Latent(0, 32, 16, 8, 24) if draw(st.booleans()) else None
    return replace(
        SMOLLM2,
        layers=draw(st.integers(2, 6)),
        kv_heads=1 if latent else kv_heads,
        heads=kv_heads * draw(st.integers(1, 6)),
        intermediate=draw(st.integers(16, 400)),
        vocab_size=draw(st.integers(16, 1000)),
        moe=moe,
        latent=latent,
    )


def complaint(plan: Plan, model: ModelConfig) -> str:
    try:
        check(plan, model)
    except ConfigError as error:
        return str(error)
    return ""


@given(models(), st.integers(1, 6), st.integers(1, 3), st.integers(1, 2), st.integers(1, 12))
def test_all_ranks_together_are_the_model(
    model: ModelConfig, tp: int, pp: int, dp: int, ep: int
) -> None:
    plan = Plan(tp=tp, pp=pp, dp_attention=dp, ep=ep)
    why = complaint(plan, model)
    if why:
        assert any(str(number) in why for number in (tp, pp, ep)), "the numbers are told"
        return
    kept = [shard(plan, rank, model) for rank in range(plan.ranks)]
    for dp_rank in range(dp):
        own = [kept[rank] for rank in plan.members(dp_rank)]
        stages = itertools.groupby(own, key=lambda one: one.layers)
        assert [layer for layers, _ in stages for layer in layers] == list(range(model.layers))
        assert {one.place.stage for one in own if one.embeds} == {0}
        assert {one.place.stage for one in own if one.predicts} == {pp - 1}
        for stage in range(pp):
            ranks = [one for one in own if one.place.stage == stage]
            assert [n for one in ranks for n in one.heads] == list(range(model.heads))
            assert [n for one in ranks for n in one.columns] == list(range(model.intermediate))
            assert [n for one in ranks for n in one.vocabulary] == list(range(model.vocab_size))
            seen = [n for one in ranks for n in one.kv_heads]
            assert set(seen) == set(range(model.kv_heads))
            if model.latent is None:
                assert len(seen) == max(tp, model.kv_heads), "copied only to fill up"
                group = model.heads // model.kv_heads
                for one in ranks:
                    assert {n // group for n in one.heads} == set(one.kv_heads)
            if model.moe is not None:
                shared = [n for one in ranks for n in one.shared]
                assert shared == list(range(model.moe.shared_width))
    if model.moe is not None and ep > 1:
        for first in range(0, plan.ranks, ep):
            spread = [n for one in kept[first : first + ep] for n in one.experts]
            assert spread == list(range(model.moe.count))
        assert all(one.expert_columns == range(model.moe.width) for one in kept)
    elif model.moe is not None:
        columns = [n for one in kept[:tp] for n in one.expert_columns]
        assert columns == list(range(model.moe.width))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(tp=2), "tp 2 does not divide 9 query and 3 KV heads; these do: 1, 3, 9"),
        (Plan(pp=31), "pp 31 is more than the 30 layers"),
        (Plan(ep=3, tp=3), "ep 3 needs experts"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(plan: Plan, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        shard(plan, 0, SMOLLM2)


def bundled(tp: int) -> list[Shard]:
    return [shard(Plan(tp=tp), rank, SMOLLM2) for rank in range(tp)]


def test_the_bundled_models_columns_fall_on_blocks() -> None:
    """TP 9 is above the number of KV heads: each is on three ranks. B18"""
    for tp in (3, 9):
        shares = bundled(tp)
        assert all(one.columns.start % UNIT == one.columns.stop % UNIT == 0 for one in shares)
        assert {len(one.heads) for one in shares} == {9 // tp}
        assert {len(one.kv_heads) for one in shares} == {1}
    assert [one.kv_heads.start for one in bundled(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_the_head_counts_when_stages_are_balanced() -> None:
    """28 million weights of the head weigh as much as eight layers."""
    first, last = estimated_stages(Plan(pp=2), SMOLLM2)
    assert (len(first), len(last)) == (19, 11)
