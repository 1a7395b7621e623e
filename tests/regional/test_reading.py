"""What reading settles about a request: how long its answer may be."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from core.config import parse
from core.errors import ContextLengthExceeded
from regional.reading import Reader
from tests.regional.fake_node import MODEL
from tests.regional.fakes import ByteText, ask, topology

READER = Reader(parse(topology([("d1", "decode")])), {MODEL: ByteText()})


@pytest.mark.parametrize(("prompt_tokens", "allowed"), [(100, 16), (4090, 6), (4095, 1)])
def test_a_default_limit_yields_to_the_context(prompt_tokens: int, allowed: int) -> None:
    """B12: a prompt that fits is answered, however little room is left."""
    request = ask("x" * prompt_tokens, max_tokens=16)
    sampling = msgspec.structs.replace(request.sampling, max_tokens_yields=True)
    reading = asyncio.run(READER.read(msgspec.structs.replace(request, sampling=sampling)))
    settled = reading.request.sampling
    assert (settled.max_tokens, settled.max_tokens_yields) == (allowed, False)


def test_a_limit_that_was_asked_for_is_refused_and_not_shortened() -> None:
    with pytest.raises(ContextLengthExceeded):
        asyncio.run(READER.read(ask("x" * 4095, max_tokens=16)))
