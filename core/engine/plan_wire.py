"""Plans and results between ranks: msgpack of values in the order of their fields, without names.

All ranks of a node run one release, so nothing here has to outlive a change of the fields. What has
its default value at the end of a record is left out: a decoding row is some forty bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any

import msgspec

from core.engine.plan import History, Row, RowResult, SampleSpec, Scores, StepPlan, StepResult

_encode = msgspec.msgpack.encode
_decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode


def encode_plan(plan: StepPlan) -> bytes:
    return _encode((plan.number, [_row(row) for row in plan.rows]))


def decode_plan(data: bytes) -> StepPlan:
    number, rows = _decode(data)
    return StepPlan(number, tuple(_made_row(row) for row in rows))


def encode_result(result: StepResult) -> bytes:
    return _encode((result.number, result.seconds, [_values(row) for row in result.rows]))


def decode_result(data: bytes) -> StepResult:
    number, seconds, rows = _decode(data)
    return StepResult(number, tuple(_made_result(row) for row in rows), seconds)


def _row(row: Row) -> list[object]:
    values = _values(row)
    if row.sample is not None:
        spec = _values(row.sample)
        if row.sample.history is not None:
            spec[_HISTORY] = (row.sample.history.tokens, row.sample.history.prompt)
        values[_SAMPLE] = spec
    return values


def _made_row(values: list[Any]) -> Row:
    sequence, token_ids, start, tables, sample, *rest = values
    if sample is not None:
        if len(sample) > _HISTORY and sample[_HISTORY] is not None:
            sample[_HISTORY] = History(*sample[_HISTORY])
        if len(sample) > _BIAS:
            sample[_BIAS] = tuple((token, value) for token, value in sample[_BIAS])
        if len(sample) > _FORBIDDEN:
            sample[_FORBIDDEN] = tuple(sample[_FORBIDDEN])
        sample = SampleSpec(*sample)
    return Row(
        sequence, tuple(token_ids), start, tuple(tuple(table) for table in tables), sample, *rest
    )


def _made_result(values: list[Any]) -> RowResult:
    sequence, *rest = values
    found = dict(zip(_NAMES[RowResult][1:], rest, strict=False))
    found["token_ids"] = tuple(found.get("token_ids", ()))
    scores = found.get("scores", ())
    found["scores"] = tuple(
        Scores(logprob, tuple(ids), tuple(logprobs)) for logprob, ids, logprobs in scores
    )
    return RowResult(sequence, **found)


def _values(record: Row | SampleSpec | RowResult) -> list[object]:
    """Of all fields in order, but for those at the end that have their defaults."""
    kind = type(record)
    values = [getattr(record, name) for name in _NAMES[kind]]
    defaults = _DEFAULTS[kind]
    while len(values) > len(_NAMES[kind]) - len(defaults) and (
        values[-1] == defaults[len(values) - len(_NAMES[kind]) - 1]
    ):
        values.pop()
    return values


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _defaults(kind: type) -> tuple[object, ...]:
    return tuple(field.default for field in fields(kind) if field.default is not MISSING)


_KINDS: Iterable[type] = (Row, SampleSpec, RowResult)
_NAMES = {kind: _names(kind) for kind in _KINDS}
_DEFAULTS = {kind: _defaults(kind) for kind in _KINDS}
_SAMPLE = _NAMES[Row].index("sample")
_HISTORY, _BIAS, _FORBIDDEN = (
    _NAMES[SampleSpec].index(name) for name in ("history", "bias", "forbidden")
)
