from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from core.engine.plan import IMPOSSIBLE, History, SampleSpec, Scores
from core.engine.sampler import HEAD, LONG_HEAD, uniform
from core.engine.sampler import sample as sample_rows


def spec(**settings: Any) -> SampleSpec:
    plain: dict[str, Any] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "choice": 0, "position": 0,
    }  # fmt: skip
    return SampleSpec(**plain | settings)


def sample(rows: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """The tokens alone; `rows` stay as they are."""
    return [one.token_id if one else None for one in sample_rows(rows.clone(), specs)]


def scores(row: torch.Tensor, one: SampleSpec) -> tuple[int, Scores]:
    (sampled,) = sample_rows(row[None].clone(), [one])
    assert sampled is not None
    assert sampled.scores is not None
    return sampled.token_id, sampled.scores


def history(prompt: Sequence[int], output: Sequence[int] = ()) -> History:
    return History(array("i", [*prompt, *output]).tobytes(), len(prompt))


def logits(vocabulary: int = 1000, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, generator=random) * scale


def by_the_book(row: torch.Tensor, s: SampleSpec) -> int:
    """The definition, with the whole vocabulary sorted."""
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    weights = ((row.double() - row.max()) / s.temperature).exp()[order]
    if s.min_p > 0:
        kept = int((weights >= s.min_p * weights[0]).sum())
        order, weights = order[:kept], weights[:kept]
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


@pytest.mark.parametrize("vocabulary", [1, 7, HEAD, HEAD + 1, 1000, LONG_HEAD + 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.9, "top_k": 40}, {"temperature": 3.0},
     {"temperature": 50.0, "top_p": 0.999}, {"top_k": HEAD + 20, "temperature": 9.0},
     {"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 1e-9, "temperature": 5.0},
     {"min_p": 0.02, "top_p": 0.8, "top_k": 30}],
    ids=str,
)  # fmt: skip
def test_draws_equal_the_definition(vocabulary: int, settings: dict[str, float]) -> None:
    row = logits(vocabulary)
    row = (row * 4).round() / 4  # many ties
    for position in range(40 if vocabulary <= 1000 else 8):
        one = spec(position=position, **settings)
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
        spec(min_p=1),
        spec(temperature=1e-45),
        spec(temperature=1e-4, min_p=0.5, top_p=0.5),
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


def test_the_number_of_threads_changes_nothing() -> None:
    row = logits(50_000, scale=1.0)
    specs = [spec(position=n, temperature=0.7 + n / 10, logprobs=3) for n in range(8)]
    before = torch.get_num_threads()
    given = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together = sample_rows(row.repeat(8, 1), specs)
            given.append([*together, *sample_rows(row[None], specs[:1])])
    finally:
        torch.set_num_threads(before)
    assert given[0] == given[1] == given[2]
    assert given[0][0] == given[0][-1]


def greedy_after(row: torch.Tensor, **settings: Any) -> int | None:
    return sample(row[None], [spec(temperature=0, **settings)])[0]


def test_bias_moves_the_choice_and_forbidden_ids_are_never_chosen() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert greedy_after(row, bias=((0, 3.5),)) == 0
    assert greedy_after(row, bias=((3, -1.5), (0, 1.0))) == 2
    assert greedy_after(row, bias=((3, -100.0), (2, -100.0))) == 1
    assert greedy_after(row, bias=((9, 100.0),)) == 3, "an id that no logit belongs to"
    forbidden: dict[str, Any] = {"forbidden": (3, 2), "min_tokens": 5}
    assert greedy_after(row, position=4, **forbidden) == 1
    assert greedy_after(row, position=5, **forbidden) == 3
    assert greedy_after(row, position=4, bias=((3, 100.0),), **forbidden) == 1
    assert greedy_after(row, position=0, forbidden=(0, 1, 2, 3), min_tokens=1) is None


def test_repetition_counts_prompt_and_output() -> None:
    row = torch.tensor([-1.0, 4.0, 3.0, 2.0])
    seen = history([1], [2])
    assert greedy_after(row, repetition_penalty=1.9, history=seen) == 1
    assert greedy_after(row, repetition_penalty=2.0, history=history([1, 1])) == 2
    assert greedy_after(row, repetition_penalty=2.0, history=history([1, 2], [1])) == 1, "equals"
    below = torch.tensor([-1.0, -1.5, -9.0])
    assert greedy_after(below, repetition_penalty=1.6, history=history([0])) == 1, "negative: times"
    assert greedy_after(row, repetition_penalty=1e-30, history=history([3])) == 3
    assert greedy_after(row * 1e30, repetition_penalty=1e-30, history=history([3])) == 3, "finite"


def test_presence_and_frequency_count_the_output_only() -> None:
    row = torch.tensor([0.0, 4.0, 3.5, 3.0])
    assert greedy_after(row, presence_penalty=2, history=history([1, 1, 1])) == 1
    assert greedy_after(row, presence_penalty=0.6, history=history([], [1])) == 2
    assert greedy_after(row, presence_penalty=0.4, history=history([], [1] * 9)) == 1
    assert greedy_after(row, frequency_penalty=0.4, history=history([1], [1])) == 1
    assert greedy_after(row, frequency_penalty=0.4, history=history([1], [1, 1])) == 2
    assert greedy_after(row, frequency_penalty=0.6, history=history([], [1, 2, 1])) == 3
    assert greedy_after(row, frequency_penalty=-2, history=history([], [3])) == 3


def test_penalties_follow_what_is_known_of_guesses_and_placeholders() -> None:
    one = spec(history=history([7, 8], [9]), presence_penalty=1.0, position=1)
    assert one.after((4, 5)) == spec(
        history=history([7, 8], [9, 4, 5]), presence_penalty=1.0, position=3
    )
    assert one.knowing((4,)) == spec(
        history=history([7, 8], [9, 4]), presence_penalty=1.0, position=1
    )
    assert spec().after((1, 2)) == spec(position=2)


def test_shaped_rows_leave_the_others_alone() -> None:
    rows = torch.stack([logits(seed=n) for n in range(4)])
    plain = [spec(position=n) for n in range(4)]
    mixed = list(plain)
    mixed[1] = spec(position=1, bias=((5, 50.0),))
    mixed[2] = spec(position=2, repetition_penalty=1.5, history=history(range(500)))
    given, expected = sample(rows, mixed), sample(rows, plain)
    assert (given[0], given[1], given[3]) == (expected[0], 5, expected[3])


def test_scores_are_of_the_models_own_distribution() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    free: dict[str, Any] = {"temperature": 0.1, "top_k": 1, "bias": ((3, 50.0),), "logprobs": 2}
    token, given = scores(row, spec(**free, presence_penalty=1.0, history=history([], [0])))
    assert token == 3
    assert given.logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert given.top_ids == (0, 1)
    assert given.top_logprobs == pytest.approx((math.log(0.5), math.log(0.3)), abs=1e-5)
    token, given = scores(row, spec(temperature=0, logprobs=0))
    assert (token, given.top_ids, given.top_logprobs) == (0, (), ())
    assert given.logprob == pytest.approx(math.log(0.5), abs=1e-5)


def test_scores_are_finite_and_in_order() -> None:  # B05
    row = torch.full((100,), float("-inf"))
    row[7] = 3.0
    token, given = scores(row, spec(logprobs=20))
    assert (token, given.logprob) == (7, 0.0)
    assert given.top_ids == (7, *(n for n in range(20) if n != 7)), "equals by id"
    assert given.top_logprobs == (0.0, *(IMPOSSIBLE,) * 19)
    ties = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])
    assert scores(ties, spec(logprobs=4))[1].top_ids == (1, 3, 0, 2)
    assert scores(ties, spec(logprobs=9))[1].top_ids == (1, 3, 0, 2, 4), "all there are"
    exact = logits(50_000)
    reference = exact.double().log_softmax(-1)
    token, given = scores(exact, spec(logprobs=5))
    assert given.logprob == pytest.approx(float(reference[token]), abs=1e-5)
    assert given.top_logprobs == pytest.approx(reference.topk(5).values.tolist(), abs=1e-5)


def test_scores_next_to_rows_without() -> None:
    rows = torch.stack([logits(seed=n) for n in range(3)])
    rows[1, 4] = float("nan")
    given = sample_rows(rows.clone(), [spec(logprobs=n) for n in (None, 1, 1)])
    assert given[0] is not None
    assert given[0].scores is None
    assert given[1] is None
    assert given[2] == sample_rows(rows[2:].clone(), [spec(logprobs=1)])[0]


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, 10), []) == []
