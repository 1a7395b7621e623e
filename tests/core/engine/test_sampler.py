from __future__ import annotations

from collections import Counter

import pytest
import torch

from core.engine.plan import SampleSpec
from core.engine.sampler import HEAD, sample, uniform


def spec(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 1, position: int = 0,
    choice: int = 0,
) -> SampleSpec:  # fmt: skip
    return SampleSpec(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, choice=choice,
        position=position,
    )  # fmt: skip


def logits(vocabulary: int = 1000, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, generator=random) * scale


def by_the_book(row: torch.Tensor, s: SampleSpec) -> int:
    """The definition, with the whole vocabulary sorted."""
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    weights = ((row.double() - row.max()) / s.temperature).exp()[order]
    if s.top_k > 0:
        order, weights = order[: s.top_k], weights[: s.top_k]
    weights = weights / weights.sum()
    mass = weights.cumsum(0)
    if s.top_p < 1:
        size = int((mass < s.top_p).sum()) + 1
        order, weights = order[:size], weights[:size]
        mass = (weights / weights.sum()).cumsum(0)
    point = uniform(s.seed, s.choice, s.position)
    return order[min(int((mass <= point).sum()), len(order) - 1)]


@pytest.mark.parametrize("vocabulary", [1, 7, HEAD, HEAD + 1, 1000])
@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.9, "top_k": 40}, {"temperature": 3.0},
     {"temperature": 50.0, "top_p": 0.999}, {"top_k": HEAD + 20, "temperature": 9.0}],
    ids=str,
)  # fmt: skip
def test_draws_equal_the_definition(vocabulary: int, settings: dict[str, float]) -> None:
    row = logits(vocabulary)
    row = (row * 4).round() / 4  # many ties
    for position in range(40):
        one = spec(position=position, **settings)  # type: ignore[arg-type]  # top_k is whole
        assert sample(row[None], [one]) == [by_the_book(row, one)]


def test_uniform_is_fixed_for_all_time() -> None:
    """These numbers are a contract: text of a seed must not change between releases."""
    assert [uniform(42, 0, n) for n in range(3)] == [
        0.7553888514674879,
        0.47528428371494047,
        0.4225835782229892,
    ]
    values = [
        uniform(seed, choice, n) for seed in range(20) for choice in range(5) for n in range(50)
    ]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:  # B14
    rows = torch.stack([logits(seed=n) for n in range(8)])
    specs = [spec(temperature=0.8 * (n % 3), top_p=0.9, seed=n, position=n) for n in range(8)]
    together = sample(rows, specs)
    alone = [sample(rows[n : n + 1], [specs[n]])[0] for n in range(8)]
    assert together == alone
    assert sample(rows.flip(0), specs[::-1]) == together[::-1]


def test_choices_and_positions_differ_and_repeat() -> None:  # B14
    row = logits(scale=0.1)[None]
    drawn = [sample(row, [spec(choice=c, position=p)])[0] for c in range(4) for p in range(8)]
    assert len(set(drawn)) > 25
    assert drawn == [
        sample(row, [spec(choice=c, position=p)])[0] for c in range(4) for p in range(8)
    ]


def test_small_settings_keep_the_best_token() -> None:  # B13
    row = logits()
    best = int(row.argmax())
    specs = [
        spec(temperature=0),
        spec(temperature=1e-4),
        spec(temperature=1e-12),
        spec(temperature=1e-300),
        spec(top_p=1e-6),
        spec(top_p=0),
        spec(top_k=1),
    ]
    assert sample(row.repeat(len(specs), 1), specs) == [best] * len(specs)


def test_greedy_takes_the_first_of_equals() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    assert sample(row, [spec(temperature=0)]) == [1]


def test_a_poisoned_row_is_none_and_the_others_stay() -> None:  # B13
    rows = torch.stack([logits(seed=n) for n in range(5)])
    specs = [spec(temperature=float(n % 2), position=n) for n in range(5)]
    expected = sample(rows, specs)
    rows[1, 500] = float("nan")
    rows[2, 7] = float("inf")
    rows[3] = float("-inf")
    found = sample(rows, specs)
    assert found == [expected[0], None, None, None, expected[4]]


def test_masked_tokens_are_never_drawn() -> None:
    row = torch.full((1000,), float("-inf"))
    row[[3, 900]] = 0.0
    drawn = Counter(sample(row[None], [spec(position=n)])[0] for n in range(200))
    assert set(drawn) == {3, 900}
    assert min(drawn.values()) > 60


def test_frequencies_follow_the_probabilities() -> None:
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    drawn = Counter(sample(row[None], [spec(position=n)])[0] for n in range(4000))
    for token, share in enumerate((0.5, 0.3, 0.2)):
        assert abs(drawn[token] / 4000 - share) < 0.03


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, 10), []) == []
