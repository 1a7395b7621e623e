"""Sums and exchanges between ranks, by sockets of our own and by torch's groups."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from core.engine.mesh import SMALL_BYTES
from core.engine.process_groups import TorchGroup
from core.errors import NodeLost
from tests.core.engine.ranks import Crowd

SMALL, LARGE = 100, SMALL_BYTES
"""Numbers; LARGE ones are more bytes than the mesh takes."""


@pytest.fixture(scope="module", params=[2, 3])
def crowd(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    found = Crowd(request.param)
    yield found
    found.close()


def given(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 2, SMALL, LARGE])
def test_all_ranks_get_the_same_sum(crowd: Crowd, size: int, dtype: torch.dtype) -> None:
    ranks = len(crowd.groups)
    sums = crowd.each(lambda group: group.sum(given(group.rank, size, dtype).view(1, -1)))
    expected = sum(given(rank, size, dtype).double() for rank in range(ranks))
    tolerance = 0.1 if dtype is torch.bfloat16 else 1e-5
    for one in sums:
        assert torch.equal(one, sums[0]), "bit for bit, or ranks would part ways"
        torch.testing.assert_close(one.double().view(-1), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("size", [1, SMALL, LARGE])
def test_each_rank_sees_what_all_gave(crowd: Crowd, size: int) -> None:
    ranks = range(len(crowd.groups))
    expected = torch.stack([given(rank, size) for rank in ranks])
    for found in crowd.each(lambda group: group.gather(given(group.rank, size))):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [4, 100_000])
def test_rows_of_uneven_numbers_are_exchanged_and_carried_back(crowd: Crowd, width: int) -> None:
    """Rank r has r + 2·d rows for rank d; rank 0 none for itself. Some are larger than any buffer
    of a socket, while everybody sends to everybody."""
    ranks = range(len(crowd.groups))

    def counts(rank: int) -> list[int]:
        return [rank + 2 * other for other in ranks]

    def there_and_back(group: TorchGroup) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        own = counts(group.rank)
        rows = given(group.rank, width * sum(own)).view(-1, width)
        found, expected = group.exchange(rows, own)
        return rows, group.carry(found + 1, expected, own), expected

    for rank, (sent, back, expected) in enumerate(crowd.each(there_and_back)):
        assert expected == tuple(counts(other)[rank] for other in ranks)
        assert torch.equal(back, sent + 1)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_is_sent_on_arrives_in_order_and_is_counted(crowd: Crowd, size: int) -> None:
    before = crowd.traffic[0].sent

    def work(group: TorchGroup) -> list[Tensor]:
        if group.rank == 0:
            for number in range(3):
                group.send(given(number, size), 1)
        return [group.receive(torch.empty(size), 0) for _ in range(3)] if group.rank == 1 else []

    got = crowd.each(work)[1]
    assert all(torch.equal(one, given(number, size)) for number, one in enumerate(got))
    assert crowd.traffic[0].sent - before == 3 * 4 * size


def test_a_sum_costs_what_the_best_ring_does(crowd: Crowd) -> None:
    ranks = len(crowd.groups)
    before = [traffic.sent for traffic in crowd.traffic]
    crowd.each(lambda group: group.sum(torch.ones(576)))
    sent = [traffic.sent - old for traffic, old in zip(crowd.traffic, before, strict=True)]
    assert sent == [2 * (ranks - 1) * 576 * 4 // ranks] * ranks


def test_whoever_waits_for_a_rank_that_goes_is_told() -> None:
    crowd = Crowd(2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(crowd.groups[0].sum, torch.ones(SMALL))
        crowd.groups[1].close()
        with pytest.raises(NodeLost, match="peer rank has gone"):
            waiting.result(30)
    crowd.close()
