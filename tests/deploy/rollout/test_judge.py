"""Whether a region became worse, told from numbers."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry

from core.metrics import EdgeMetrics, render
from deploy.rollout.judge import Counts, complaint, others, read


def counts(answers: int, errors: int = 0, first_s: float = 0.02) -> Counts:
    """First deltas spread evenly around one time."""
    bounds = (first_s * 0.9, first_s * 1.1, float("inf"))
    return Counts(answers, errors, dict(zip(bounds, (0, answers, answers), strict=True)))


WELL = counts(200)


@pytest.mark.parametrize(
    ("now", "before", "meanwhile", "words"),
    [
        (counts(200), WELL, WELL, None),
        (counts(200, 4), WELL, WELL, None),  # 2 % is the bound itself
        (counts(200, 5), WELL, WELL, "2.5% of its 200 answers failed, against 0.0%"),
        (counts(200, 5), counts(200, 2), WELL, None),
        (counts(200, 5), WELL, counts(200, 2), None),  # the others fail too
        (counts(9, 9), WELL, WELL, None),  # too few
        (counts(10, 10), WELL, WELL, "100.0% of its 10 answers failed"),
        (counts(200, first_s=0.029), WELL, WELL, None),
        (counts(200, first_s=0.031), WELL, WELL, "first deltas take 0.033 s .*against 0.022 s"),
        (counts(200, first_s=0.031), WELL, counts(200, first_s=0.04), None),  # a rush
        (counts(200, first_s=9.0), counts(3), Counts(), None),  # nothing to compare with
        (counts(200, first_s=9.0), counts(3), WELL, "first deltas"),
    ],
)
def test_what_is_worse(now: Counts, before: Counts, meanwhile: Counts, words: str | None) -> None:
    found = complaint(now, before, meanwhile)
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found)


def test_percentile_is_read_between_the_bounds_of_a_bucket() -> None:
    spread = Counts(10, 0, {0.1: 5, 0.2: 10, float("inf"): 10})
    assert spread.first_p90() == pytest.approx(0.18)
    assert Counts().first_p90() is None
    beyond = Counts(10, 0, {0.1: 5, float("inf"): 10})
    assert beyond.first_p90() == 0.1  # nobody knows how far beyond


def test_what_came_since() -> None:
    assert counts(30, 3).since(counts(10, 1)) == Counts(20, 2, {**counts(20).firsts})
    anew = counts(5).since(counts(50, 2))  # an edge was started again
    assert (anew.answers, anew.errors) == (0, 0)


def test_pages_of_edges_add_up() -> None:
    pages = []
    for _ in range(2):
        metrics = EdgeMetrics(CollectorRegistry())
        metrics.attempts.labels("eu", "ok").inc(8)
        metrics.attempts.labels("eu", "node_lost").inc()
        metrics.attempts.labels("eu", "context_length_exceeded").inc()  # the caller's fault
        metrics.attempts.labels("eu", "no_capacity").inc()  # full is not broken
        metrics.attempts.labels("us", "from_the_future").inc(3)
        for _ in range(8):
            metrics.first_delta_seconds.labels("eu").observe(0.4)
        pages.append(render(metrics.registry))
    found = read(pages)
    eu = found["eu"]
    assert (eu.answers, eu.errors) == (22, 2)
    assert eu.first_p90() == pytest.approx(0.4, rel=0.35)
    assert others(found, "eu").errors == 6
