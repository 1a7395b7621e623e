"""Answers held to a schema by a real forward pass: valid, and the same in every company (B09)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from core.engine.drafter import PromptLookup
from core.engine.engine import Engine
from core.engine.grammar import Masks
from core.engine.messages import (
    EngineStats,
    RankConfig,
    Run,
    SequenceFailed,
    SequenceSpec,
    Stepped,
)
from core.engine.plan import History, LoadedModel, Row, Runner, SampleSpec, SequenceId
from core.engine.runner_torch import TorchRunner
from core.text.grammar import grammar_of
from core.text.model import TextModel, load_text
from core.text.tools.formats import PLAIN
from core.types import FinishReason, GenerateRequest, ModelName, RequestId, ResponseFormat
from tests.core.models.tiny import prompt, random_state, tiny_config, write_folder
from tests.core.text.walks import vocabulary
from tests.tiny_text import ENDOFTEXT_ID, IM_END_ID, write_tiny_folder

ENDS = frozenset({IM_END_ID, ENDOFTEXT_ID})
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["é", "boat", None]},
        "size": {"type": "integer", "minimum": -9, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
}


def grammar(schema: object) -> str:
    return grammar_of(
        GenerateRequest(
            id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0,
            response_format=ResponseFormat(schema=json.dumps(schema)),
        ),
        PLAIN,
        vocabulary,
    )  # fmt: skip


def held(tokens: Sequence[int], **more: Any) -> SequenceSpec:
    spec = SequenceSpec(
        token_ids=tuple(tokens), max_tokens=120, stop_ids=ENDS,
        grammar=grammar(SCHEMA),
    )  # fmt: skip
    return msgspec.structs.replace(spec, **more)


SPECS = {
    "greedy": held(prompt(9), temperature=0),
    "hot": held(prompt(21), temperature=1.5, seed=7),
    "penalised": held(prompt(14), temperature=0.7, seed=3, repetition_penalty=1.2, top_p=0.9),
    "scored": held(prompt(5), temperature=1.0, seed=4, logprobs=2, top_k=5),
    "narrow": held(prompt(7), temperature=2.0, seed=5, min_p=0.1, choice=1),
    "plain": SequenceSpec(token_ids=tuple(prompt(11)), max_tokens=40, temperature=0.9, seed=1),
}
Loaded = tuple[Runner, LoadedModel, TextModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")
    config = tiny_config()
    return write_folder(folder, config, random_state(config))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[Loaded]:
    runner = TorchRunner(
        RankConfig(node="n", socket_fd=-1, source=str(folder), kv_blocks=64, dtype="float32")
    )
    yield runner, runner.load(lambda stage, fraction: None), load_text(folder)
    runner.close()


def play(
    loaded: Loaded,
    specs: Mapping[str, SequenceSpec],
    *,
    depth: int = 1,
    guess: bool = False,
    blocks: int = 64,
    stages: int = 1,
) -> tuple[dict[str, list[int]], EngineStats]:
    runner, model, _ = loaded
    geometry = msgspec.structs.replace(model.geometry, blocks=(blocks,))
    engine = Engine(
        replace(model, geometry=geometry),
        runner,
        max_sequences=8,
        max_step_tokens=32,
        depth=depth,
        stages=stages,
        drafter=PromptLookup if guess else None,
    )
    texts: dict[str, list[int]] = {name: [] for name in specs}
    ended: dict[str, FinishReason] = {}
    for name, spec in specs.items():
        engine.handle(Run(SequenceId(name), spec))
    while engine.step():
        for message in engine.messages():
            assert isinstance(message, Stepped)
            for output in message.outputs:
                texts[output.sequence].extend(output.token_ids)
                assert len(output.scores) in (0, len(output.token_ids))
                if output.finish is not None:
                    ended[output.sequence] = output.finish
    assert set(ended) == set(specs)
    engine.scheduler.roster.check_integrity()
    return texts, engine.stats()


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, spec in SPECS.items():
        found |= play(loaded, {name: spec})[0]
    return found


def documents(loaded: Loaded, texts: Mapping[str, list[int]]) -> list[object]:
    """The answers that ended by themselves."""
    text = loaded[2]
    return [
        json.loads(text.decode(ids[:-1]))
        for name, ids in texts.items()
        if name != "plain" and ids[-1] in ENDS
    ]


def test_every_answer_that_ends_fits_the_schema(
    loaded: Loaded, alone: dict[str, list[int]]
) -> None:
    found = documents(loaded, alone)
    more = {f"seed {seed}": held(prompt(9), temperature=1.5, seed=seed) for seed in range(7)}
    found += documents(loaded, play(loaded, more)[0])
    assert len(found) >= 8
    for document in found:
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("guess", [False, True], ids=["", "guessing"])
def test_the_answer_is_the_one_alone(
    loaded: Loaded, alone: dict[str, list[int]], depth: int, guess: bool
) -> None:
    texts, stats = play(loaded, SPECS, depth=depth, guess=guess)
    assert texts == alone
    assert bool(stats.drafted_tokens) is guess


def test_a_preempted_answer_goes_on_where_it_was(
    loaded: Loaded, alone: dict[str, list[int]]
) -> None:
    """B16, with a schema."""
    texts, stats = play(loaded, SPECS, blocks=16)
    assert stats.preemptions > 0
    assert texts == alone


def test_a_continued_answer_is_the_same(loaded: Loaded, alone: dict[str, list[int]]) -> None:
    """On another engine, from any cut: the matcher is made again from the output."""
    for name in ("hot", "penalised"):
        whole = alone[name]
        for cut in (1, len(whole) // 2, len(whole) - 1):
            given = tuple(whole[:cut])
            spec = msgspec.structs.replace(SPECS[name], output_ids=given)
            assert play(loaded, {name: spec})[0][name] == whole[cut:]


def test_a_guess_that_the_grammar_forbids_costs_nothing_but_the_guess(loaded: Loaded) -> None:
    """The prompt holds a near miss of the answer, over and over."""
    text = loaded[2]
    miss = text.encode_prompt('{"kind": "boat", "size": "much"}' * 3)
    specs = {"a": held(miss, temperature=0)}
    assert play(loaded, specs, guess=True)[0] == play(loaded, specs)[0]


def test_a_grammar_that_the_output_breaks_ends_that_sequence_alone(loaded: Loaded) -> None:
    runner, model, _ = loaded
    engine = Engine(model, runner, max_sequences=8, max_step_tokens=64)
    engine.handle(Run(SequenceId("bad"), held(prompt(9), output_ids=(65, 66))))
    engine.handle(Run(SequenceId("good"), SPECS["greedy"]))
    failed: list[SequenceId] = []
    finished: list[str] = []
    while engine.step():
        for message in engine.messages():
            if isinstance(message, SequenceFailed):
                failed.append(message.sequence)
                assert "grammar" in message.message
            elif isinstance(message, Stepped):
                finished += [one.sequence for one in message.outputs if one.finish is not None]
    assert (failed, finished) == (["bad"], ["good"])


# ------------------------------------------------------------------ masks alone


def row_of(name: str, outputs: Sequence[int], guesses: Sequence[int] = ()) -> Row:
    spec = SampleSpec(
        temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=len(outputs),
        grammar=grammar({"enum": ["ab", "ac"]}),
        history=History(b"", 1).plus((1, *outputs)),
    )  # fmt: skip
    ids = (1, *guesses)
    return Row(SequenceId(name), ids, 0, ((0,),), spec, drafts=len(guesses))


@pytest.fixture
def masks() -> Iterator[Masks]:
    made = Masks(vocabulary, 300, sequences=2)
    yield made
    made.close()


def allowed(masks: Masks, *rows: Row) -> list[set[int]]:
    filling = masks.begin(rows)
    assert filling is not None
    filled = filling.result()
    assert not filled.broken
    return [{n for n in range(300) if n in one} for one in filled.allowed.values()]


def test_masks_follow_the_text_wherever_it_goes(masks: Masks) -> None:
    first, a, b, c = (ord(char) for char in '"abc')
    assert allowed(masks, row_of("s", [])) == [{first}]
    assert allowed(masks, row_of("s", [first, a])) == [{b, c}]
    assert allowed(masks, row_of("s", [first])) == [{a}]  # another life of the same name
    assert allowed(masks, row_of("s", [first, a, c, first])) == [{IM_END_ID}]
    assert max(max(one) for one in allowed(masks, row_of("t", []))) < 271  # no row without a token


def test_each_guess_has_a_mask_of_its_own_and_is_taken_back(masks: Masks) -> None:
    first, a, b, c = (ord(char) for char in '"abc')
    assert allowed(masks, row_of("s", [], [first, a, b])) == [{first}, {a}, {b, c}, {first}]
    assert allowed(masks, row_of("s", [first], [c, a])) == [{a}]  # what follows does not count
    assert allowed(masks, row_of("s", [first, a])) == [{b, c}]


def test_rows_without_a_grammar_keep_their_places(masks: Masks) -> None:
    plain = Row(SequenceId("p"), (1,), 0, ((0,),), None)
    held_row = row_of("f", [])
    assert held_row.sample is not None
    free = replace(held_row, sample=replace(held_row.sample, grammar=""))
    filling = masks.begin([plain, free, row_of("s", [])])
    assert filling is not None
    assert list(filling.result().allowed) == [1]
    assert masks.begin([plain, free]) is None


def test_more_sequences_than_are_kept_are_followed_again(masks: Masks) -> None:
    first, a = ord('"'), ord("a")
    for _ in range(2):
        for name in "xyz":
            assert allowed(masks, row_of(name, [first])) == [{a}]
