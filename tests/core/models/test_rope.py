"""Rotary frequencies where the comparison with transformers does not reach."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.rope import RopeScaling, inverse_frequencies, mscale
from core.models.weights import fingerprint, open_weights
from tests.core.models.families import LLAMA, YARN, family_folder, scaled
from tests.core.models.test_config import read

DYNAMIC = {"type": "dynamic", "factor": 4.0}


def test_plain_frequencies_fall_from_one() -> None:
    found = inverse_frequencies(10000.0, 8, None)
    assert found == pytest.approx([1, 0.1, 0.01, 0.001])


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling(kind="yarn", factor=8.0, original_context=4096)
    plain = inverse_frequencies(10000.0, 128, None)
    found = inverse_frequencies(10000.0, 128, scaling)
    turns = [4096 * value / (2 * math.pi) for value in plain]
    for value, before, turn in zip(found, plain, turns, strict=True):
        if turn > 40:
            assert value == before
        elif turn < 0.8:
            assert value == pytest.approx(before / 8)
        else:
            assert before / 8 * (1 - 1e-9) <= value <= before


def test_amplitude_is_in_the_scores_and_not_in_stored_keys(tmp_path: Path) -> None:
    plain = read(tmp_path)
    yarn = read(tmp_path, rope_scaling=YARN)
    assert yarn.attention_scale == pytest.approx(plain.attention_scale * mscale(8.0) ** 2)


def test_original_context_is_the_models_own_where_none_is_named(tmp_path: Path) -> None:
    config = read(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 2.0})
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_context == config.context == 512


def test_yarn_without_a_factor_takes_the_ratio_of_contexts(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 128}
    config = read(tmp_path, rope_scaling=scaling)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 4.0


def test_only_dynamic_rope_serves_more_than_the_file_says(tmp_path: Path) -> None:
    dynamic, plain = read(tmp_path, rope_scaling=DYNAMIC), read(tmp_path)
    assert (dynamic.context, dynamic.context_limit, plain.context_limit) == (512, 2048, 512)
    assert dynamic.serving(2048).context == 2048
    for config, context in ((dynamic, 2049), (plain, 513)):
        with pytest.raises(ConfigError, match=rf"{context} is above the model's own limit"):
            config.serving(context)


def test_kv_is_shared_by_all_contexts_that_turn_keys_alike(tmp_path: Path) -> None:
    """A shorter served context leaves the fingerprint; a stretched one has its own."""
    plain = family_folder(tmp_path / "plain", LLAMA)
    stretched = family_folder(tmp_path / "dynamic", scaled(LLAMA, DYNAMIC))

    def identity(folder: Path, context: int | None) -> bytes:
        source = open_weights(folder, context)
        try:
            return fingerprint(source, "float32")
        finally:
            source.close()

    assert identity(plain, None) == identity(plain, 100)
    assert identity(stretched, None) == identity(stretched, 100)
    assert len({identity(stretched, context) for context in (512, 1024, 2048)}) == 3


def test_a_stretched_base_is_that_of_the_served_length(tmp_path: Path) -> None:
    def frequencies(config: ModelConfig) -> list[float]:
        return config.inverse_frequencies()

    config = read(tmp_path, rope_scaling=DYNAMIC)
    plain = replace(config, rope_scaling=None)
    assert frequencies(config) == frequencies(plain) == frequencies(config.serving(100))
    grown = 10000.0 * (4.0 * 1024 / 512 - 3.0) ** (16 / 14)
    assert frequencies(config.serving(1024))[1] == pytest.approx(grown ** (-1 / 8))
