"""Every plan computes what one rank computes: all families, batches, chunks and prefixes mixed."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from core.engine.plan import History, Row, RowResult, SampleSpec, StepPlan, StepResult
from core.engine.runner_split import LeadingRunner
from core.engine.split_rank import SplitRank
from core.engine.stepper import Stepper, kv_geometry
from core.errors import ConfigError, NodeLost
from core.parallel import Plan
from tests.core.engine.ranks import serving, steppers
from tests.core.models.families import FAMILIES, VARIANTS, family_folder
from tests.core.models.tiny import (
    GREEDY,
    forced,
    load,
    prompt,
    random_state,
    row,
    stepper,
    tiny_config,
    write_folder,
    write_gguf,
)

DENSE = (Plan(tp=2), Plan(tp=4), Plan(pp=3), Plan(tp=2, pp=2))
"""With four query and two KV heads: tp 4 copies KV heads."""
SPREAD = (
    Plan(tp=2, ep=2), Plan(tp=4, ep=2), Plan(dp_attention=2, ep=2),
    Plan(tp=2, dp_attention=2, ep=4), Plan(pp=2, dp_attention=2, ep=2),
)  # fmt: skip
CHOSEN = {name: FAMILIES[name] for name in ("llama3", "qwen3", "qwen3_moe", "deepseek_v3")} | {
    "window": VARIANTS["qwen3, biases, tied, window"],
    "latent": VARIANTS["deepseek_v3, halves, biases"],
}
MIXTURES = ("qwen3_moe", "deepseek_v3")
CASES = [(family, plan) for family in CHOSEN for plan in DENSE] + [
    (family, plan) for family in MIXTURES for plan in SPREAD
]
TOLERANCE = 1e-4
A, B, C = prompt(60, 1), prompt(60, 2), prompt(60, 3)
C[:16] = A[:16]  # what lies in block 1 already


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("plans")
    return {name: family_folder(root / name, config) for name, config in CHOSEN.items()}


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> dict[str, Stepper]:
    return {name: stepper(load(folder)) for name, folder in folders.items()}


def mixed(groups: int) -> list[list[Row]]:
    """Chunks, a decode beside them, a prefix that another sequence has computed, all decoding."""

    def part(ids: list[int], start: int, end: int, table: Sequence[int], name: str) -> Row:
        return row(ids[start:end], start, table, name=name, groups=groups)

    return [
        [part(A, 0, 20, (1, 2), "a"), part(B, 0, 33, (4, 5, 6), "b")],
        [
            part(B, 33, 34, (4, 5, 6), "b"),
            part(A, 20, 37, (1, 2, 3), "a"),
            part(C, 16, 40, (1, 7, 8), "c"),
        ],
        [
            part(A, 37, 38, (1, 2, 3), "a"),
            part(B, 34, 35, (4, 5, 6), "b"),
            part(C, 40, 41, (1, 7, 8), "c"),
        ],
    ]


@pytest.mark.parametrize(("family", "plan"), CASES, ids=lambda one: str(one))
def test_logits_are_those_of_one_rank(
    family: str, plan: Plan, folders: dict[str, Path], whole: dict[str, Stepper]
) -> None:
    one = whole[family]
    with steppers(folders[family], plan) as ranks:
        for rows in mixed(len(one.pool.groups)):
            expected = forced(one, rows)
            for dp_rank in range(plan.dp_attention):
                found = ranks.forced(rows, dp_rank)
                torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        assert len({loaded.fingerprint for loaded in ranks.loaded}) == 1


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_references_agree_too(
    family: str, folders: dict[str, Path], whole: dict[str, Stepper]
) -> None:
    """PyTorch's operations, as on a machine without a compiler."""
    plan = Plan(tp=2, ep=2 if family == "deepseek_v3" else 1)
    rows = mixed(1)[0]
    with steppers(folders[family], plan, native=False) as ranks:
        found = ranks.forced(rows)
    torch.testing.assert_close(found, forced(whole[family], rows), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
def test_blocks_of_a_gguf_are_multiplied_where_they_lie(
    tp: int, encoding: str, tmp_path: Path
) -> None:
    """Ten blocks of columns for three ranks; heads of 16 cut blocks of 32 in the output."""
    config = tiny_config(num_attention_heads=6, num_key_value_heads=tp, intermediate_size=320)
    path = write_gguf(tmp_path / "m.gguf", config, random_state(config), encoding)
    one = stepper(load(path))
    with steppers(path, Plan(tp=tp)) as ranks:
        for rows in mixed(1):
            found = ranks.forced(rows)
            torch.testing.assert_close(found, forced(one, rows), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "vocabulary", "tp"),
    [(8, 2, 320, 2), (8, 2, 320, 4), (12, 3, 320, 3), (8, 2, 321, 2)],
)
def test_a_split_beyond_the_kv_heads_copies_them(
    heads: int, kv_heads: int, vocabulary: int, tp: int, tmp_path: Path
) -> None:  # B18
    config = tiny_config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary
    )
    path = write_folder(tmp_path, config, random_state(config))
    one = stepper(load(path))
    with steppers(path, Plan(tp=tp)) as ranks:
        for rows in mixed(1):
            found = ranks.forced(rows)
            torch.testing.assert_close(found, forced(one, rows), atol=TOLERANCE, rtol=0)
        held = sum(loaded.geometry.bytes_per_token for loaded in ranks.loaded)
    alone = kv_geometry(one.decoder.config, "float32", 1).bytes_per_token
    assert held == alone * max(1, tp // kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(8, 2, 3), (12, 3, 2), (8, 2, 16)])
def test_a_split_that_does_not_fit_the_heads_is_refused_at_once(
    heads: int, kv_heads: int, tp: int, tmp_path: Path
) -> None:  # B18
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kv_heads)
    path = write_folder(tmp_path, config, {})  # without a weight that could be read
    why = f"tp {tp} does not divide {heads} query and {kv_heads} KV heads"
    with pytest.raises(ConfigError, match=why), steppers(path, Plan(tp=tp)):
        pass


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama3", Plan(tp=2, pp=2)),
        ("llama3", Plan(tp=4)),
        ("deepseek_v3", Plan(tp=2, pp=2)),
        ("window", Plan(pp=3)),
    ],
    ids=lambda one: str(one),
)
def test_every_rank_says_which_kv_it_holds(
    family: str, plan: Plan, folders: dict[str, Path], whole: dict[str, Stepper]
) -> None:
    """Each (layer, head) of each group is somewhere, and twice only where it is copied."""
    with steppers(folders[family], plan) as ranks:
        held = [loaded.geometry for loaded in ranks.loaded]
    model = whole[family].decoder.config
    heads = model.kv_shape[0]
    copies = plan.tp if model.latent is not None else max(1, plan.tp // heads)
    for index, group in enumerate(kv_geometry(model, "float32", 64).groups):
        parts = [geometry.groups[index] for geometry in held]
        assert {part.kind for part in parts} == {group.kind}
        cells = [
            (layer, head)
            for part in parts
            for layer in range(part.first_layer, part.first_layer + part.layers)
            for head in range(part.first_head, part.first_head + part.kv_heads)
        ]
        every = [(layer, head) for layer in range(group.layers) for head in range(heads)]
        assert sorted(cells) == sorted(every * copies)
    assert {geometry.blocks for geometry in held} == {held[0].blocks}


# ------------------------------------------------------------------ served


SAMPLED = SampleSpec(temperature=0.9, top_p=0.95, top_k=0, seed=11, choice=0, position=0)
HISTORY = History(array("i", A[:38]).tobytes(), 20)
KINDS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "scores": SampleSpec(0.7, 1.0, 20, seed=3, choice=1, position=4, logprobs=3),
    "penalties": SampleSpec(
        1.1, 1.0, 0, seed=8, choice=0, position=18, repetition_penalty=1.4, history=HISTORY
    ),
}


def played(one: LeadingRunner | Stepper, groups: int) -> Iterator[tuple[RowResult, ...]]:
    """Results of steps in which every row samples, each in its own way."""
    specs = list(KINDS.values())
    for number, rows in enumerate(mixed(groups)):
        turned = [
            Row(each.sequence, each.token_ids, each.start, each.block_tables,
                specs[(n + number) % len(specs)])
            for n, each in enumerate(rows)
        ]  # fmt: skip
        bad = row([1, 9999], 0, (9,), name="bad", groups=groups)
        plan = StepPlan(number + 1, (bad, *turned))
        if isinstance(one, Stepper):
            yield one.step(plan).rows
        else:
            yield one.submit(plan).result(30).rows


def stepped(plan: StepPlan, rank: SplitRank) -> StepResult | None:
    return rank.stepper.step(plan)


def same(found: tuple[RowResult, ...], expected: tuple[RowResult, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.sequence, one.token_ids, one.error) == (
            other.sequence, other.token_ids, other.error,
        )  # fmt: skip
        for mine, theirs in zip(one.scores, other.scores, strict=True):
            assert mine.top_ids == theirs.top_ids
            near = pytest.approx((theirs.logprob, *theirs.top_logprobs), abs=TOLERANCE)
            assert (mine.logprob, *mine.top_logprobs) == near


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama3", Plan(tp=2, pp=2)),
        ("window", Plan(pp=3)),
        ("qwen3_moe", Plan(tp=2, dp_attention=2, ep=4)),
        ("deepseek_v3", Plan(tp=4)),
    ],
    ids=lambda one: str(one),
)
def test_what_is_drawn_is_what_one_rank_draws(
    family: str, plan: Plan, folders: dict[str, Path], whole: dict[str, Stepper]
) -> None:
    one = whole[family]
    groups = len(one.pool.groups)
    expected = list(played(one, groups))
    assert expected[0][0].error is not None
    with serving(folders[family], plan) as leaders:
        for leader in leaders:  # each pool alone: the others take part without rows
            for found, wanted in zip(played(leader, groups), expected, strict=True):
                same(found, wanted)


def test_pools_that_share_experts_step_together(
    folders: dict[str, Path], whole: dict[str, Stepper]
) -> None:
    family, plan = "qwen3_moe", Plan(dp_attention=2, ep=2)
    rows = mixed(1)[0]
    steps = [StepPlan(1, (one,)) for one in rows]
    expected = [whole[family].step(step).rows for step in steps]
    with serving(folders[family], plan) as leaders:
        for _ in range(5):
            handles = [leader.submit(step) for leader, step in zip(leaders, steps, strict=True)]
            assert [handle.result(30).rows for handle in handles] == expected


def test_several_steps_are_under_way_in_a_pipeline(
    folders: dict[str, Path], whole: dict[str, Stepper]
) -> None:
    rows = mixed(1)[0]
    steps = [StepPlan(n, (rows[n % 2],)) for n in range(6)]
    with serving(folders["llama3"], Plan(pp=2)) as (leader,):
        handles = [leader.submit(step) for step in steps]
        for step, handle in zip(steps, handles, strict=True):
            result = handle.result(30)
            assert result.number == step.number
            same(result.rows, whole["llama3"].step(step).rows)
        work = leader.work()
    assert len(work.stage_seconds) == 2
    assert min(work.stage_seconds) > 0
    assert 0 <= work.bubble < 1
    assert 0 < work.sent_bytes == work.least_bytes


def test_a_decode_step_sends_hardly_more_than_it_must(folders: dict[str, Path]) -> None:
    """Two sums of the hidden state a layer and one of the embedding; 3 layers, 64 numbers."""
    with steppers(folders["llama3"], Plan(tp=2)) as ranks:
        for number in range(20):
            step = StepPlan(number, (row([5], 0, (1,)),))
            results = ranks.each(partial(stepped, step))
            assert results[0] is not None
            assert results[1] is not None
            assert results[0].rows == results[1].rows
        alone = [rank.stepper for rank in ranks.ranks]
    sums = 20 * 7 * 64 * 4
    # So small a model shows what a draw costs: 32 bytes a rank where 8 would do.
    assert [one.least_bytes for one in alone] == [sums + 20 * 8] * 2
    assert [one.sent_bytes for one in alone] == [sums + 20 * 32] * 2


def test_a_rank_that_goes_ends_every_step(folders: dict[str, Path]) -> None:
    with serving(folders["llama3"], Plan(tp=2)) as (leader,):
        for peer in leader._rank.company.peers.values():  # as the end of its process would
            peer.close()
        step = StepPlan(1, (row([5], 0, (1,)),))
        with pytest.raises(NodeLost, match="gone"):
            leader.submit(step).result(30)
        with pytest.raises(NodeLost, match="gone"):
            leader.work()
