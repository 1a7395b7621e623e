"""Log probabilities beside the text: whole characters, stop strings, every split into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.events import TokenLogprob
from core.text.model import TextModel, load_text
from core.types import FinishReason
from tests.tiny_text import tiny_tokenizer, write_tiny_folder

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
MERGES = ["Q R", "S T", "U V", "W X", "WX Y"]
IM_END_ID = 256 + len(MERGES) + 2


@dataclass(frozen=True)
class Given:
    """Scores whose value tells which token they were made for."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("logprobs")
    ends = [IM_END_ID]
    return load_text(
        write_tiny_folder(
            folder,
            tokenizer=tiny_tokenizer(merges=MERGES),
            config_ends=ends,
            generation_ends=ends,
        )
    )


def run(
    model: TextModel,
    steps: Sequence[Sequence[int]],
    *,
    stops: tuple[str, ...] = (),
    last: FinishReason | None = LENGTH,
    min_tokens: int = 0,
) -> tuple[str, int, list[TokenLogprob]]:
    """Text, tokens and entries; no entry ever runs ahead of its text."""
    writer = model.writer(stops, model.end_ids, min_tokens=min_tokens)
    text, tokens = "", 0
    entries: list[TokenLogprob] = []
    for number, step in enumerate(steps):
        scores = [Given(-float(token)) for token in step]
        written = writer.push(step, last if number == len(steps) - 1 else None, scores)
        text, tokens = text + written.text, written.tokens
        entries += written.logprobs
        assert text.startswith(spelled(entries).rstrip("\ufffd"))
        if written.finish is not None:
            break
    return text, tokens, entries


def spelled(entries: Sequence[TokenLogprob]) -> str:
    return b"".join(one.utf8 for one in entries).decode(errors="replace")


@settings(deadline=None)
@given(
    text=st.text(alphabet="PQRSTUVé🦙 ", max_size=16),
    stops=st.lists(st.text(alphabet="PQRSé🦙", min_size=1, max_size=4), max_size=2),
    size=st.integers(1, 7),
    limit=st.integers(1, 40),
    min_tokens=st.integers(0, 12),
)
def test_bytes_of_the_entries_are_the_answer(
    model: TextModel, text: str, stops: list[str], size: int, limit: int, min_tokens: int
) -> None:  # B01, B02, B05
    ids = (model.encode_prompt(text) if text else [])[:limit]
    steps = [ids[at : at + size] for at in range(0, len(ids), size)] or [ids]
    shown, tokens, entries = run(model, steps, stops=tuple(stops), min_tokens=min_tokens)
    assert spelled(entries) == shown
    assert [one.logprob for one in entries] == [-float(token) for token in ids[: len(entries)]]
    assert (shown, tokens, entries) == run(model, [ids], stops=tuple(stops), min_tokens=min_tokens)


def test_a_character_over_several_tokens(model: TextModel) -> None:  # B05
    ids = model.encode_prompt("é🦙")
    text, tokens, entries = run(model, [[one] for one in ids])
    assert (text, tokens) == ("é🦙", 6)
    assert [one.utf8 for one in entries] == [bytes([b]) for b in "é🦙".encode()]
    assert [one.token for one in entries[:2]] == ["\\xc3", "\\xa9"]
    text, tokens, entries = run(model, [[one] for one in ids[:4]])
    assert (text, tokens, len(entries)) == ("é\ufffd", 4, 4)


def test_entries_wait_with_the_text_of_a_possible_stop(model: TextModel) -> None:
    writer = model.writer(("STX",), frozenset())
    ids = [model.encode_prompt(one)[0] for one in ("P", "ST", "Q")]
    seen = [writer.push([one], None, [Given(-1.0)]) for one in ids]
    assert [one.text for one in seen] == ["P", "", "STQ"]
    assert [[entry.token for entry in one.logprobs] for one in seen] == [["P"], [], ["ST", "Q"]]


def test_entries_of_a_stop_string_are_not_told(model: TextModel) -> None:  # B02
    ids = [model.encode_prompt(one)[0] for one in ("P", "QR", "ST", "UV")]
    text, tokens, entries = run(model, [[one] for one in ids], stops=("RSTU",))
    assert (text, tokens) == ("PQ", 4), "all of it was generated"
    assert [(one.token, one.utf8) for one in entries] == [("P", b"P"), ("QR", b"Q")]


def test_the_end_token_has_an_entry_without_bytes(model: TextModel) -> None:
    ids = [*model.encode_prompt("P"), IM_END_ID]
    text, tokens, entries = run(model, [ids], last=None)
    assert (text, tokens) == ("P", 2)
    assert [(one.token, one.utf8) for one in entries] == [("P", b"P"), ("<|im_end|>", b"")]


def test_alternatives_are_spelled_as_they_would_stand(model: TextModel) -> None:
    writer = model.writer((), model.end_ids)
    p, half = model.encode_prompt("P")[0], model.encode_prompt("é")[0]
    scores = Given(-0.5, (p, half, IM_END_ID), (-0.5, -1.0, -9999.0))
    (entry,) = writer.push([p], None, [scores]).logprobs
    assert [(one.token, one.utf8, one.logprob) for one in entry.top] == [
        ("P", b"P", -0.5), ("\\xc3", b"\xc3", -1.0), ("<|im_end|>", b"", -9999.0),
    ]  # fmt: skip


def test_stop_strings_are_not_looked_for_before_min_tokens(model: TextModel) -> None:
    ids = [model.encode_prompt(one)[0] for one in ("P", "QR", "P", "QR", "P")]
    assert run(model, [ids], stops=("QR",))[:2] == ("P", 2)
    assert run(model, [ids], stops=("QR",), min_tokens=2)[:2] == ("PQRP", 4)
    assert run(model, [ids], stops=("RP",), min_tokens=2)[:2] == ("PQRPQ", 5)
