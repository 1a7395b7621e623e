"""Which experts a token meets, and what they make of it, against definitions in plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.experts import Sorted
from kernels.ops import Ops
from kernels.routing import Routing, route
from tests.kernels.test_ops import IMPLEMENTATIONS, Weight, make, random, weight


def chosen(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> list[list[int]]:
    ids, _ = route(logits, correction, routing)
    return ids.tolist()


def test_softmax_weights_are_of_all_experts_unless_normalised() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -5.0]])
    shares = logits[0].softmax(-1)
    ids, weights = route(logits, None, Routing(chosen=2, normalised=False))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], shares[[1, 2]])
    _, weights = route(logits, None, Routing(chosen=2, scale=3.0))
    torch.testing.assert_close(weights[0], 3 * shares[[1, 2]] / shares[[1, 2]].sum())


def test_the_correction_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    correction = torch.tensor([-1.0, 0.0, 0.0])
    routing = Routing(chosen=2, sigmoid=True, normalised=False, scale=2.5)
    ids, weights = route(logits, correction, routing)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], 2.5 * logits[0, 1:].sigmoid())


def test_only_the_best_groups_are_considered() -> None:
    """Groups of two: the best expert of all stands in a group whose two best are less."""
    logits = torch.tensor([[4.0, -9.0, 1.0, 1.1, 0.2, 0.1]])
    routing = Routing(chosen=2, sigmoid=True, groups=3, kept_groups=1)
    assert chosen(logits, routing) == [[3, 2]]
    assert chosen(logits, Routing(chosen=2, sigmoid=True)) == [[0, 3]]
    two = Routing(chosen=3, sigmoid=True, groups=3, kept_groups=2)
    assert set(chosen(logits, two)[0]) == {2, 3, 4}
    singles = Routing(chosen=1, sigmoid=True, groups=6, kept_groups=1)
    assert chosen(logits, singles) == [[0]]


def test_no_tokens_choose_none() -> None:
    ids, weights = route(torch.empty(0, 6), None, Routing(chosen=2, groups=3, kept_groups=1))
    assert ids.shape == weights.shape == (0, 2)


def test_pairs_come_in_the_order_of_their_experts() -> None:
    pairs = Sorted.of(torch.tensor([[2, 0], [2, 4], [0, 2]]), 6)
    assert pairs.order.tolist() == [1, 4, 0, 2, 5, 3]
    assert pairs.offsets.tolist() == [0, 2, 2, 5, 5, 6, 6]
    assert pairs.offsets.dtype == torch.int32


HIDDEN, WIDTH, COUNT = 64, 96, 5


def made(ops: Ops, encoding: str) -> tuple[list[list[Weight]], list[list[Weight]]]:
    gate_up = [
        [weight(encoding, WIDTH, HIDDEN, 10 * n + m) for m in range(2)] for n in range(COUNT)
    ]
    return gate_up, [[weight(encoding, HIDDEN, WIDTH, 10 * n + 5)] for n in range(COUNT)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q4_1"])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_each_token_meets_its_experts(name: str, encoding: str, tokens: int) -> None:
    """Weights of all kinds, also experts that nobody chose."""
    ops = make(name, torch.float32)
    gate_up, down = made(ops, encoding)
    experts = ops.experts(gate_up, down)
    assert experts.count == COUNT
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(tokens + 1)])[1:]
    shares = torch.rand(tokens, 3, generator=generator)
    x = random(tokens, HIDDEN)
    ours = experts(x, ids, shares)
    assert ours.shape == (tokens, HIDDEN)
    for token in range(tokens):
        wanted = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            gate, up = (part.exact.double() @ x[token].double() for part in gate_up[expert])
            inner = gate / (1 + (-gate).exp()) * up
            wanted += share * (down[expert][0].exact.double() @ inner)
        error = (ours[token].double() - wanted).norm() / wanted.norm()
        assert error < 1e-5
