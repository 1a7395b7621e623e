"""Answers held to a schema by ranks that share the vocabulary, or the layers: those of one rank."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from core.engine.messages import RankConfig
from core.engine.runner_torch import TorchRunner
from core.parallel import Plan
from core.text.model import load_text
from tests.core.engine.ranks import serving
from tests.core.engine.test_grammar import SCHEMA, SPECS, documents, play
from tests.core.models.tiny import random_state, tiny_config, write_folder
from tests.tiny_text import write_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine query and three KV heads, as the bundled model has."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    config = tiny_config(num_attention_heads=9, num_key_value_heads=3)
    return write_folder(folder, config, random_state(config))


def test_a_schema_is_kept_by_every_plan(folder: Path) -> None:
    """Tokens that fit it lie on all ranks of a vocabulary, and on some of them none."""
    one = TorchRunner(
        RankConfig(node="n", socket_fd=-1, source=str(folder), kv_blocks=64, dtype="float32")
    )
    model, text = one.load(lambda stage, fraction: None), load_text(folder)
    expected, _ = play((one, model, text), SPECS)
    one.close()
    found = documents((one, model, text), expected)
    assert found
    for document in found:
        jsonschema.validate(document, SCHEMA)
    for plan in (Plan(tp=3), Plan(pp=2)):
        with serving(folder, plan) as (leader,):
            texts, _ = play((leader, model, text), SPECS, stages=plan.pp)
        assert texts == expected, plan
