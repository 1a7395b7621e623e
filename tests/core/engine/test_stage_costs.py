"""What layers and ends cost, measured, and how far a measurement is believed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.engine import stage_costs
from core.engine.stage_costs import measured_costs, measured_stages, trusted
from core.models.config import ModelConfig
from core.models.parallel import layer_weights
from core.models.weights import open_weights
from core.parallel import Plan
from kernels.ops import select
from tests.core.models.families import VARIANTS, family_folder


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("qwen3_moe", Plan(tp=2, ep=2, pp=2)),
        ("deepseek_v3", Plan(pp=2)),
        ("qwen3, biases, tied, window", Plan(pp=3)),
    ],
)
def test_layers_of_one_kind_cost_the_same(family: str, plan: Plan, tmp_path: Path) -> None:
    source = open_weights(family_folder(tmp_path / "m", VARIANTS[family]))
    ops = select("cpu", torch.float32, columns=source.config.columns)
    layers, before, after = measured_costs(plan, source, ops)
    assert len(layers) == 3
    assert min(*layers, before, after) > 0
    weights = layer_weights(source.config)
    for one in range(3):
        for other in range(3):
            if source.config.window(one) == source.config.window(other):
                assert (layers[one] == layers[other]) == (weights[one] == weights[other])
    runs = measured_stages(plan, source, ops)
    assert [layer for run in runs for layer in run] == [0, 1, 2]
    assert len(runs) == plan.pp


def test_a_measurement_far_from_the_weights_is_cut_back() -> None:
    model = ModelConfig(
        family="llama", vocab_size=1000, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16,
        intermediate=96, context=64, norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip
    expected = 64 * 1000 / layer_weights(model)[0]  # in layers
    for given, believed in ((0.01, expected / 2), (expected, expected), (99.0, expected * 2)):
        assert trusted(model, [1.0] * 4, given) == pytest.approx(believed)


def test_the_first_stage_has_the_turn_of_each_step_beside_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_costs, "measured_costs", lambda *given: ([2e-4] * 30, 0.0, 0.0))
    monkeypatch.setattr(stage_costs, "trusted", lambda model, layers, after: after)
    source = open_weights(family_folder(tmp_path / "m", VARIANTS["qwen3"]))
    runs = measured_stages(Plan(pp=2), source, select("cpu", torch.float32))
    assert [len(run) for run in runs] == [14, 16]
