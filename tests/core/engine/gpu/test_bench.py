from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.engine.gpu import bench
from core.engine.gpu.device import HostDevice
from tests.core.engine.gpu.ahead import AheadOps

SMALL = replace(
    bench.LLAMA_1B, vocab_size=50, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8,
    intermediate=48,
)  # fmt: skip


def test_what_a_step_must_read() -> None:
    """Llama 3.2 1B has 1,235,814,400 weights, and 16 layers of 2 × 8 × 64 numbers a token."""
    assert bench.step_bytes(bench.LLAMA_1B, 0, 1000) == 2 * 1_235_814_400
    more = bench.step_bytes(bench.LLAMA_1B, 64, 1000) - 2 * 1_235_814_400
    assert more == 64 * 1000 * 16 * 2 * 8 * 64 * 2


def test_steps_are_measured_by_graphs() -> None:
    class Counting(HostDevice):
        replays = 0

        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            def replay() -> None:
                self.replays += 1
                run()

            return replay

    device = Counting()
    ops = AheadOps(torch.float32)
    found = list(bench.measure(SMALL, ops, device, (1, 3), context=40, steps=12))
    assert [one.batch for one in found] == [1, 3]
    assert all(one.seconds > 0 for one in found)
    assert device.replays == 2 * 12
    assert found[1].nbytes - found[0].nbytes == 2 * 46 * 2 * 2 * 2 * 8 * 2
    assert found[0].share(1e9) == pytest.approx(found[0].nbytes / 1e9 / found[0].seconds)


def test_without_a_gpu_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    out = tmp_path / "figures.json"
    assert bench.main(["--out", str(out)]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert not out.exists()
