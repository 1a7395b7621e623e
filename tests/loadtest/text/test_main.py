"""The measure of schemas: what it asks for can be asked, and what it says of the samples."""

import json

import jsonschema

from core.text.grammar import grammar_of
from core.text.tools.formats import PLAIN
from core.types import GenerateRequest, ModelName, RequestId, ResponseFormat
from loadtest.bench.workload import Request
from loadtest.text.__main__ import BATCH, figures, held, schema
from tests.core.text.walks import spell, vocabulary


def test_no_answer_can_end_before_its_limit() -> None:
    request = GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0,
        response_format=ResponseFormat(schema=schema(3)),
    )  # fmt: skip
    grammar = grammar_of(request, PLAIN, vocabulary)
    line = {"name_3": "x", "amount": 5, "kinds": [], "note": None}
    jsonschema.validate([line] * 500, json.loads(schema(3)))
    taken, length = spell(vocabulary(), grammar, json.dumps([line] * 80))
    assert not taken
    assert length == len(json.dumps([line] * 80)) - 1  # all but the bracket that ends it


def test_each_row_has_a_schema_of_its_own() -> None:
    rows = held([Request(0.0, (1, 2), 5)] * BATCH)
    assert len({row.schema for row in rows}) == BATCH
    assert {(row.prompt, row.tokens) for row in rows} == {((1, 2), 5)}


def test_ratios_are_taken_round_by_round() -> None:
    samples = {
        "decode 16": {"free": [100.0, 50.0, 200.0], "with a schema": [80.0, 50.0, 100.0]},
        "first token": {
            "free": [10.0, 20.0, 30.0],
            "the first schema": [120.0],
            "with a schema": [25.0, 25.0],
        },
    }
    ratio, later, first = figures(samples)
    assert (ratio.value, ratio.fails) == (1.25, True)
    assert (later.value, first.value) == (5.0, 100.0)
    assert not first.fails
