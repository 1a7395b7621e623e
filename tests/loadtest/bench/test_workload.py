from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from loadtest.bench import timing, workload
from loadtest.bench.workload import Mix


def test_steady_counts_only_while_all_decode() -> None:
    first = [1.0, 2.0, 3.0, 4.0, 5.0]
    second = [3.0, 3.5, 4.0, 4.5, 5.0, 5.5]
    # from 3 (the second's first token) to 5 (the first's last): 2 tokens and 4
    assert timing.steady([first, second]) == pytest.approx(6 / 2)


def test_steady_of_one_leaves_the_first_token_out() -> None:
    assert timing.steady([[2.0, 2.5, 3.0]]) == pytest.approx(2.0)


def test_no_common_span_is_an_error() -> None:
    with pytest.raises(ValueError, match="all together"):
        timing.steady([[1.0, 2.0], [3.0, 4.0]])


def test_throughput_counts_from_the_start() -> None:
    assert timing.throughput([[1.0, 2.0], [4.0]]) == pytest.approx(3 / 4)


def test_gaps_stay_within_a_request() -> None:
    assert timing.gaps([[1.0, 1.5, 3.0], [9.0]]) == [0.5, 1.5]


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.75, 3.0), (0.76, 4.0), (1.0, 4.0)])
def test_percentile(share: float, expected: float) -> None:
    assert timing.percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_median() -> None:
    assert timing.median([5.0, 1.0, 2.0]) == 2.0
    assert timing.median([4.0, 1.0, 2.0, 9.0]) == 3.0


def test_mixed_requests_keep_their_bounds_and_their_seed() -> None:
    mix = Mix(count=200, per_second=4.0)
    requests = workload.mixed(Random(1), mix, 49152)
    assert requests == workload.mixed(Random(1), mix, 49152)
    assert requests != workload.mixed(Random(2), mix, 49152)
    lengths = [len(request.prompt) for request in requests]
    answers = [request.tokens for request in requests]
    assert 64 <= min(lengths) < max(lengths) <= 1024
    assert 16 <= min(answers) < max(answers) <= 128
    assert requests[-1].at == pytest.approx(50, rel=0.3)
    assert all(a.at < b.at for a, b in pairwise(requests))


def test_ids_are_inside_a_small_vocabulary() -> None:
    assert max(workload.prompt(Random(1), 500, 120)) == 119
    assert set(workload.prompt(Random(1), 5, 40)) == {39}


def test_the_batch_decodes_long_enough_together() -> None:
    requests = workload.batch(Random(1), 8, 49152)
    assert len({request.prompt for request in requests}) == 8
    # as if one prompt were read after the other while those before decode already
    times = [[number + n * 1.0 for n in range(r.tokens)] for number, r in enumerate(requests)]
    start, end = times[-1][0], times[0][-1]
    assert end - start >= workload.DECODED


def test_an_agents_answer_stands_in_its_prompt() -> None:
    text = workload.agent_text(Random(1))
    assert text != workload.agent_text(Random(2))
    body = text.split("```toml\n")[1].split("```")[0]
    assert text.count(body) == 2
    assert body.startswith(text.rsplit("```toml\n", 1)[1])
