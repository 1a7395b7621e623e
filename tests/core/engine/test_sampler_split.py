"""Sampling from a vocabulary that is spread over ranks: the same tokens, without gathering it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from core.engine import sampler, sampler_split
from core.engine.allowed import Allowed, Scratch
from core.engine.plan import History, SampleSpec
from core.engine.sampler import Sampled
from core.engine.sampler_split import Vocabulary
from core.models.parallel import split
from tests.core.engine.ranks import Crowd

PLAIN = SampleSpec(temperature=1.0, top_p=1.0, top_k=0, seed=5, choice=0, position=0)
GREEDY = replace(PLAIN, temperature=0.0)


@pytest.fixture(scope="module", params=[2, 3])
def crowd(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    found = Crowd(request.param)
    yield found
    found.close()


Bits = npt.NDArray[np.uint8]


def held(bits: dict[int, Bits], vocabulary: int) -> dict[int, Allowed]:
    """With memory of its own for each rank: here they are threads."""
    return {place: Allowed(one, Scratch(vocabulary)) for place, one in bits.items()}


def spread(
    crowd: Crowd, logits: Tensor, specs: list[SampleSpec], bits: dict[int, Bits]
) -> list[Sampled | None]:
    shards = split(logits.shape[1], len(crowd.groups))
    found = crowd.each(
        lambda group: sampler_split.sample(
            logits[:, shards[group.rank].start : shards[group.rank].stop].clone(),
            specs,
            Vocabulary(shards, group),
            held(bits, logits.shape[1]),
        )
    )
    assert all(one == found[0] for one in found), "every rank comes to the same"
    return found[0]


def agree(
    crowd: Crowd,
    logits: Tensor,
    specs: list[SampleSpec],
    bits: dict[int, Bits] | None = None,
) -> list[Sampled | None]:
    whole = sampler.sample(logits.clone(), specs, held(bits or {}, logits.shape[1]))
    found = spread(crowd, logits, specs, bits or {})
    for one, other in zip(found, whole, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token_id == other.token_id
        assert (one.scores is None) == (other.scores is None)
        if one.scores is not None and other.scores is not None:
            assert one.scores.top_ids == other.scores.top_ids
            assert one.scores.logprob == pytest.approx(other.scores.logprob, abs=1e-6)
            tops = pytest.approx(other.scores.top_logprobs, abs=1e-6)
            assert one.scores.top_logprobs == tops
    return found


def flat(rows: int, vocabulary: int, scale: float, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=random) * scale


FILTERS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 1e-30},
    "hot": {"temperature": 50.0},
    "top-k": {"top_k": 7},
    "top-k behind the candidates": {"top_k": 900},
    "nucleus": {"top_p": 0.5},
    "wide nucleus": {"top_p": 0.98},
    "min-p": {"min_p": 0.02},
    "all of them": {"top_k": 700, "top_p": 0.9, "min_p": 0.001, "temperature": 1.4},
}


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_every_filter_draws_the_same(crowd: Crowd, kind: str, scale: float) -> None:
    """Nearly flat rows fall behind the candidates: they are found by search."""
    specs = [replace(PLAIN, seed=n, **FILTERS[kind]) for n in range(6)]  # type: ignore[arg-type]  # fields by name
    assert all(agree(crowd, flat(6, 3000, scale), specs))


@pytest.mark.parametrize("kind", ["greedy", "plain", "top-k", "wide nucleus"])
def test_equals_are_taken_by_id_across_ranks(crowd: Crowd, kind: str) -> None:
    specs = [replace(PLAIN, seed=n, **FILTERS[kind]) for n in range(8)]  # type: ignore[arg-type]  # fields by name
    coarse = flat(8, 2000, 1.0).mul(2).round().div(2)
    signs = torch.zeros(8, 700)
    signs[:, ::3] = -0.0
    for logits in (coarse, torch.zeros(8, 1000), signs):
        assert all(agree(crowd, logits, specs))


def test_what_shapes_a_row_reaches_every_rank(crowd: Crowd) -> None:
    history = History(array("i", [3, 3, 250, 120, 299, 250]).tobytes(), 2)
    specs = [
        replace(GREEDY, bias=((299, 50.0),)),
        replace(GREEDY, bias=((0, 50.0), (299, 80.0))),
        replace(GREEDY, forbidden=(7, 200), min_tokens=1),
        replace(PLAIN, history=history, repetition_penalty=1.8, presence_penalty=0.7),
        replace(PLAIN, history=history, frequency_penalty=1.5, logprobs=3),
        replace(GREEDY, logprobs=2),
    ]
    logits = flat(6, 300, 2.0)
    logits[2, 200] = 99.0
    only = np.zeros(320, dtype=np.uint8)
    only[123] = 1
    found = agree(crowd, logits, specs, {5: np.packbits(only, bitorder="little")})
    assert [one and one.token_id for one in found[:2]] == [299, 299]
    assert found[2] is not None
    assert found[2].token_id != 200
    assert found[5] is not None
    assert found[5].token_id == 123


def test_a_row_that_is_not_finite_spoils_no_other(crowd: Crowd) -> None:
    logits = flat(5, 300, 1.0)
    logits[0, 299] = float("nan")
    logits[1, 2] = float("inf")
    logits[2] = float("-inf")
    logits[3, 150:] = float("-inf")  # one rank has nothing to offer
    found = agree(crowd, logits, [replace(PLAIN, logprobs=2)] * 3 + [PLAIN, GREEDY])
    assert [one is None for one in found] == [True, True, True, False, False]


def test_reported_numbers_are_the_models_own(crowd: Crowd) -> None:
    logits = flat(3, 300, 2.0)
    specs = [replace(PLAIN, logprobs=n, temperature=3.0) for n in (0, 4, 20)]
    found = agree(crowd, logits, specs)
    assert [len(one.scores.top_ids) for one in found if one and one.scores] == [0, 4, 20]


def test_few_ids_for_many_ranks(crowd: Crowd) -> None:
    for size in (3, 5, 40):
        specs = [replace(PLAIN, seed=n, logprobs=2) for n in range(4)]
        assert all(agree(crowd, flat(4, size, 1.0), specs))


@pytest.mark.parametrize(
    ("spec", "scale", "limit"), [(GREEDY, 1.0, 64), (PLAIN, 8.0, 1024), (PLAIN, 0.01, 4096)]
)
def test_logits_are_never_gathered(
    crowd: Crowd, spec: SampleSpec, scale: float, limit: int
) -> None:
    """Bytes that one rank sends for one token of a vocabulary of 200 KB."""
    logits = flat(1, 50_000, scale)
    before = [traffic.sent for traffic in crowd.traffic]
    spread(crowd, logits, [spec], {})
    sent = [traffic.sent - old for traffic, old in zip(crowd.traffic, before, strict=True)]
    assert max(sent) <= limit * (len(crowd.groups) - 1)
