"""The device's choices are the host's, whatever the rows beside them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.engine import sampler
from core.engine.gpu.sampler import (
    UNSOUND,
    choose,
    draw_together,
    numbers,
    plain,
    random_rows,
)
from core.engine.plan import History, SampleSpec
from core.engine.process_groups import TorchGroup
from core.engine.sampler_split import Vocabulary
from core.models.parallel import split
from kernels.draw import draw_by_sorting
from tests.core.engine.ranks import Crowd

BASE = SampleSpec(temperature=1.0, top_p=1.0, top_k=0, seed=3, choice=0, position=0)


def chosen(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    ids: list[int] = choose(logits, numbers(specs), random_rows(specs)).tolist()
    return ids


@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
def test_the_same_tokens_as_on_the_host(vocabulary: int) -> None:
    settings = itertools.product((0.0, 1e-30, 0.7, 3.0), (0, 1, 5), (0.0, 0.4, 1.0), (0.0, 0.05))
    specs = [
        replace(BASE, temperature=t, top_k=k, top_p=p, min_p=m, seed=seed, position=seed % 5)
        for seed, (t, k, p, m) in enumerate(settings)
    ]
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(specs), vocabulary, generator=generator) * 4
    logits[::3] = logits[::3].round()  # many equals
    expected = [one.token_id for one in sampler.sample(logits.clone(), specs) if one is not None]
    assert chosen(logits, specs) == expected
    alone = [chosen(logits[n : n + 1], specs[n : n + 1])[0] for n in range(len(specs))]
    assert alone == expected


def test_the_best_candidates_decide_nearly_always() -> None:
    """What they cannot decide is told apart, and drawn from all."""
    asked: list[list[bool]] = []

    def draw(logits: Tensor, given: Tensor, wanted: Tensor, ids: Tensor) -> None:
        asked.append(wanted.tolist())
        draw_by_sorting(logits, given, wanted, ids)

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 3000, generator=generator) * 6
    logits[3] *= 0.001  # all alike: the best 256 are a tenth of the mass
    specs = [
        BASE,
        replace(BASE, top_k=40, top_p=0.9),
        replace(BASE, top_k=2000, temperature=9.0),
        replace(BASE, seed=4),
    ]
    ids = choose(logits, numbers(specs), random_rows(specs), draw).tolist()
    assert asked == [[False, False, True, True]]
    expected = [one.token_id for one in sampler.sample(logits.clone(), specs) if one is not None]
    assert ids == expected


def test_the_distribution_is_followed() -> None:
    shares = torch.tensor([0.1, 0.2, 0.3, 0.4])
    specs = [replace(BASE, seed=seed) for seed in range(4000)]
    ids = chosen(shares.log().expand(4000, 4).contiguous(), specs)
    counts = torch.tensor(ids).bincount(minlength=4) / 4000
    assert (counts - shares).abs().max() < 0.03


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_row_is_told_and_no_other(bad: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    specs = [BASE, replace(BASE, temperature=0.0), replace(BASE, seed=9)]
    clean = chosen(logits, specs)
    for row in range(3):
        poisoned = logits.clone()
        poisoned[row, 7] = bad
        expected = [UNSOUND if n == row else token for n, token in enumerate(clean)]
        assert chosen(poisoned, specs) == expected


def test_what_needs_the_host_is_known() -> None:
    history = History(b"", 0)
    assert plain(BASE)
    for change in (
        {"logprobs": 0},
        {"grammar": "x"},
        {"bias": ((1, 2.0),)},
        {"repetition_penalty": 1.1, "history": history},
        {"forbidden": (1,), "min_tokens": 1},
    ):
        assert not plain(replace(BASE, **change)), change


@pytest.mark.parametrize(("vocabulary", "ranks"), [(3000, 2), (200, 3)])
def test_ranks_that_share_a_vocabulary_come_to_the_same(vocabulary: int, ranks: int) -> None:
    """Where their candidates decide, they have decided what the host decides of all logits; where
    each rank sends all that it has, they always do."""
    settings = itertools.product((0.0, 0.7, 3.0), (0, 5, 900), (0.4, 1.0), (0.0, 0.05))
    specs = [
        replace(BASE, temperature=t, top_k=k, top_p=p, min_p=m, seed=seed)
        for seed, (t, k, p, m) in enumerate(settings)
    ]
    logits = torch.randn(len(specs), vocabulary, generator=torch.Generator().manual_seed(5)) * 3
    logits[::3] = logits[::3].round()
    logits[7, 3] = float("nan")
    expected = [
        UNSOUND if one is None else one.token_id for one in sampler.sample(logits.clone(), specs)
    ]
    shards = split(vocabulary, ranks)
    crowd = Crowd(ranks)

    def own(group: TorchGroup) -> tuple[list[int], list[bool]]:
        columns = logits[:, shards[group.rank].start : shards[group.rank].stop]
        given = numbers(specs), random_rows(specs)
        ids, decided = draw_together(columns, *given, Vocabulary(shards, group))
        return ids.tolist(), decided.tolist()

    found = crowd.each(own)
    crowd.close()
    assert all(one == found[0] for one in found)
    ids, decided = found[0]
    sure = [n for n in range(len(specs)) if decided[n] or expected[n] == UNSOUND]
    assert [ids[n] for n in sure] == [expected[n] for n in sure]
    assert len(specs) * 0.7 < len(sure) <= len(specs)
    assert (len(sure) == len(specs)) == (vocabulary == 200)
