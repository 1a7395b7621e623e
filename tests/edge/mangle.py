"""Bodies that clients might send by mistake or malice, from a seed: mangled ones of a dialect."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence

ODD: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, 5e-324, "", " ",
    "x", "null", "\x00", "\ud7ff", "🦙", "a" * 3000, "<|im_start|>", [], {}, [[]], [None], [{}],
    {"": None}, {"type": "object"}, ["a", 1], {"a": {"b": {"c": [1, {"d": None}]}}},
    {"role": "user", "content": "x"}, [{"role": "user", "content": "x"}], {"type": "json_object"},
)  # fmt: skip
BROKEN: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"nul", b"{}{}", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 2000,
    b'{"a":' * 500 + b"1" + b"}" * 500, b'{"prompt": "\\ud800"}', b'{"prompt": "x",}', b"\x00",
)  # fmt: skip


def bodies(seed: int, count: int, fields: Sequence[str], good: Sequence[object]) -> Iterator[bytes]:
    """`count` bodies: odd values in known fields, fields that are none, cut and torn JSON, and now
    and then a good one."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.05:
            yield draw.choice(BROKEN)
            continue
        body = json.loads(json.dumps(draw.choice(good)))
        for _ in range(draw.choice((0, 1, 1, 2, 3, 6))):
            _mangle(draw, body, fields)
        raw = json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        if kind < 0.15:
            raw = _torn(draw, raw)
        yield raw


def _mangle(draw: random.Random, body: object, fields: Sequence[str]) -> None:
    """One change, somewhere in the tree."""
    while True:
        inner = [one for one in _children(body) if isinstance(one, dict | list) and one]
        if not inner or draw.random() < 0.6:
            break
        body = draw.choice(inner)
    value = copy.deepcopy(draw.choice(ODD))
    if isinstance(body, dict):
        keys = [*body, *fields, "nonsense", ""]
        key = draw.choice(keys)
        if draw.random() < 0.1:
            body.pop(key, None)
        else:
            body[key] = value
    elif isinstance(body, list):
        if body and draw.random() < 0.5:
            body[draw.randrange(len(body))] = value
        else:
            body.extend([value] * draw.choice((1, 2, 40)))


def _children(body: object) -> list[object]:
    if isinstance(body, dict):
        return list(body.values())
    return body if isinstance(body, list) else []


def _torn(draw: random.Random, raw: bytes) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return draw.choice(
        (raw[:at], raw[:at] + b"\xc3" + raw[at:], raw[:at] + b'"' + raw[at:], raw + raw[:at])
    )
