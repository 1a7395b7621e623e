"""The benchmark's own sums, and its way through every kernel on small sizes."""

from __future__ import annotations

import json

import pytest
import torch

from kernels import bench_triton as bench
from kernels.bench_triton_cases import BUILDERS, SMALL, Case
from tests.kernels.triton.cases import DEVICE


def test_every_case_agrees_with_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FULL", SMALL)
    timed = iter(range(1, 100))
    limits = bench.Ceilings(copy=1e9, matmul=1e12)
    found = list(
        bench.measure(BUILDERS, torch.device(DEVICE), torch.float16, lambda _: next(timed) / 1e3)
    )
    assert [one.seconds for one in found] == [at / 1e3 for at in range(1, len(BUILDERS) + 1)]
    assert all(one.error < 2e-3 for one in found), [(o.case.name, o.error) for o in found]
    record = bench.report(found, limits, "a card")
    assert json.loads(json.dumps(record)) == record
    figures = record["figures"]
    assert isinstance(figures, list)
    assert len(figures) == len(BUILDERS) + 2
    assert {tuple(figure) for figure in figures} == {("name", "value", "unit", "target", "floor")}
    assert len(bench.table(found, limits)) == len(BUILDERS) + 4


def test_share_is_of_the_nearer_bound() -> None:
    limits = bench.Ceilings(copy=100.0, matmul=1000.0)

    def case(moved: int, flops: int, floor: float | None) -> Case:
        return Case("x", lambda: torch.ones(1), lambda: torch.ones(1), moved, flops, 0.9, floor)

    memory = bench.Measured(case(50, 100, 0.5), seconds=1.0, error=0.0)
    compute = bench.Measured(case(50, 800, 0.9), seconds=1.0, error=0.0)
    assert bench.share(memory, limits) == 0.5
    assert bench.bound(memory.case, limits) == "copy"
    assert bench.share(compute, limits) == 0.8
    assert bench.bound(compute.case, limits) == "matmul"
    assert bench.holds(memory, limits)
    assert not bench.holds(compute, limits)
    assert bench.holds(bench.Measured(case(50, 800, None), 9.0, 0.0), limits)
    assert not bench.holds(bench.Measured(case(50, 100, 0.5), 1.0, 0.1), limits)
    assert not bench.holds(bench.Measured(case(50, 100, 0.5), 1.0, float("nan")), limits)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 0
    assert capsys.readouterr().out == ("bench-kernels: no CUDA device here, nothing was measured\n")
