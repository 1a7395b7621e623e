"""What one rank says is what another hears."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.engine.plan import (
    History,
    Row,
    RowResult,
    SampleSpec,
    Scores,
    SequenceId,
    StepPlan,
    StepResult,
)
from core.engine.plan_wire import decode_plan, decode_result, encode_plan, encode_result

numbers = st.integers(0, 1 << 40)
reals = st.floats(0, 10, allow_nan=False)
names = st.text(max_size=12).map(SequenceId)
ids = st.lists(st.integers(0, 1 << 31), max_size=5).map(tuple)
specs = st.builds(
    SampleSpec,
    temperature=reals, top_p=reals, top_k=numbers, seed=numbers, choice=numbers, position=numbers,
    min_p=st.sampled_from([0.0, 0.1]), repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]), frequency_penalty=st.sampled_from([0.0, -1.0]),
    bias=st.lists(st.tuples(numbers, reals), max_size=2).map(tuple), forbidden=ids,
    min_tokens=st.sampled_from([0, 3]),
    history=st.none() | st.builds(History, st.binary(max_size=16), numbers),
    logprobs=st.none() | st.integers(0, 20), grammar=st.sampled_from(["", "%llguidance {}"]),
)  # fmt: skip
rows = st.builds(
    Row,
    sequence=names, token_ids=ids, start=numbers,
    block_tables=st.lists(ids, min_size=1, max_size=2).map(tuple),
    sample=st.none() | specs, drafts=st.integers(0, 4), follows=st.booleans(),
)  # fmt: skip
scores = st.builds(Scores, reals, ids, st.lists(reals, max_size=3).map(tuple))
results = st.builds(
    RowResult, sequence=names, token_ids=ids, error=st.none() | st.text(max_size=9),
    scores=st.lists(scores, max_size=2).map(tuple),
)  # fmt: skip


@given(st.builds(StepPlan, st.integers(-1, 1 << 40), st.lists(rows, max_size=3).map(tuple)))
def test_a_plan_arrives_as_it_was(plan: StepPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


@given(st.builds(StepResult, numbers, st.lists(results, max_size=3).map(tuple), reals))
def test_a_result_arrives_as_it_was(result: StepResult) -> None:
    assert decode_result(encode_result(result)) == result


def test_a_decoding_row_is_short() -> None:
    spec = SampleSpec(temperature=0.7, top_p=0.95, top_k=0, seed=1 << 40, choice=0, position=30)
    row = Row(SequenceId("a" * 20), (4711,), 300, (tuple(range(20)),), spec)
    one = len(encode_plan(StepPlan(1, (row,))))
    two = len(encode_plan(StepPlan(1, (row, row))))
    assert two - one < 110


@pytest.mark.parametrize("kind", [Row, SampleSpec, RowResult])
def test_defaults_come_last(kind: type) -> None:
    """So that a record may end early."""
    has = [field.default is not MISSING for field in fields(kind)]
    assert has == sorted(has)
