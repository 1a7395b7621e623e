"""The writer of one choice: text, finish and count, however ids fall into steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.text.model import TextModel, load_text
from core.text.writer import Written
from core.types import FinishReason
from tests.tiny_text import ENDOFTEXT_ID, IM_END_ID, tiny_tokenizer, write_tiny_folder

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LETTERS = ("P", "QR", "ST", "UV", "WXY", "Z")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Tokens for the letters of B02, so that stop strings begin and end inside tokens."""
    merges = ["Q R", "S T", "U V", "W X", "WX Y"]
    ends = [256 + len(merges) + 2]
    return load_text(
        write_tiny_folder(
            tmp_path_factory.mktemp("letters"),
            tokenizer=tiny_tokenizer(merges=merges),
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
) -> tuple[str, FinishReason | None, int, list[int]]:
    """Push steps until one finishes, as a node front does; `last` comes with the last step."""
    writer = model.writer(stops, model.end_ids)
    text, finish = "", None
    ids: list[int] = []
    written = Written("", (), None, 0)
    for number, step in enumerate(steps):
        written = writer.push(step, last if number == len(steps) - 1 else None)
        text += written.text
        ids += written.token_ids
        if written.finish is not None:
            assert finish is None, "a finish comes once"
            finish = written.finish
    assert written.tokens == len(ids)
    return text, finish, written.tokens, ids


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [ids[start:end] for start, end in pairwise(edges)] or [ids]


@pytest.mark.parametrize("per_step", [1, 2, 6])
@pytest.mark.parametrize(
    ("stops", "text", "finish", "tokens"),
    [
        (("STUVWXY",), "PQR", STOP, 5),
        (("RSTU",), "PQ", STOP, 4),
        (("UVW", "XYZ"), "PQRST", STOP, 5),
        (("123",), "PQRSTUVWXYZ", LENGTH, 6),
        (("Z",), "PQRSTUVWXY", STOP, 6),
        (("P",), "", STOP, 1),
    ],
)
def test_stop_strings_of_b02(
    model: TextModel,
    stops: tuple[str, ...],
    text: str,
    finish: FinishReason,
    tokens: int,
    per_step: int,
) -> None:
    ids = [model.encode_prompt(letters)[0] for letters in LETTERS]
    steps = [ids[at : at + per_step] for at in range(0, len(ids), per_step)]
    got = run(model, steps, stops=stops)
    assert got == (text, finish, tokens, ids[:tokens])


@settings(deadline=None)
@given(
    text=st.text(alphabet="PQRSTé🦙 ", max_size=20),
    stops=st.lists(st.text(alphabet="PQRSé🦙", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40)),
    end_at=st.none() | st.integers(0, 40),
    limit=st.integers(0, 60),
)
def test_any_split_into_steps_gives_the_same(
    model: TextModel,
    text: str,
    stops: list[str],
    cuts: list[int],
    end_at: int | None,
    limit: int,
) -> None:
    ids = model.encode_prompt(text) if text else []
    if end_at is not None:
        ids.insert(min(end_at, len(ids)), next(iter(model.end_ids)))
    ids = ids[:limit]
    whole = run(model, [ids], stops=tuple(stops))
    assert run(model, split(ids, cuts), stops=tuple(stops)) == whole
    shown, finish, tokens, kept = whole
    assert kept == ids[:tokens]
    assert model.decode(kept).startswith(shown)
    assert not any(stop in shown for stop in stops)
    if finish is LENGTH:
        assert (shown, tokens) == (model.decode(ids), len(ids))


def test_end_token_prints_nothing_and_is_counted(model: TextModel) -> None:
    # B03
    end = next(iter(model.end_ids))
    hi = model.encode_prompt("hi")
    assert run(model, [[*hi, end, *hi]], last=None) == ("hi", STOP, 3, [*hi, end])


def test_what_only_looked_like_a_stop_is_sent_at_the_end(model: TextModel) -> None:
    assert run(model, [model.encode_prompt("QRST")], stops=("STX",))[:2] == ("QRST", LENGTH)
    end = next(iter(model.end_ids))
    ids = [*model.encode_prompt("QRST"), end]
    assert run(model, [ids], stops=("STX",), last=STOP)[:2] == ("QRST", STOP)


def test_half_a_character_is_flushed_once_at_the_end(model: TextModel) -> None:
    # B01
    ids = model.encode_prompt("é🦙")
    for limit in range(len(ids) + 1):
        assert run(model, split(ids[:limit], range(9)))[0] == model.decode(ids[:limit])


def test_pushes_after_the_end_give_nothing(model: TextModel) -> None:
    writer = model.writer(("P",), frozenset())
    assert writer.push(model.encode_prompt("P"), None).finish is STOP
    assert writer.push(model.encode_prompt("QR"), LENGTH) == Written("", (), None, 1)
    assert writer.finished


def test_a_finish_may_come_without_ids(model: TextModel) -> None:
    writer = model.writer((), frozenset())
    first = model.encode_prompt("é")[:1]
    assert writer.push(first, None).text == ""
    assert writer.push((), LENGTH) == Written("\ufffd", (), LENGTH, 1)


def test_ignored_end_tokens_do_not_end(model: TextModel) -> None:
    end = next(iter(model.end_ids))
    writer = model.writer((), frozenset())
    written = writer.push([end, *model.encode_prompt("P")], LENGTH)
    assert (written.text, written.finish, written.tokens) == ("P", LENGTH, 2)


def test_an_end_id_that_is_an_ordinary_token_prints_nothing(tmp_path: Path) -> None:
    # B03: generation config says [2, 7], the tokenizer says 2
    folder = write_tiny_folder(tmp_path, generation_ends=[ord("2"), ord("7")], config_ends=None)
    model = load_text(folder)
    assert model.end_ids == {ord("2"), ord("7"), IM_END_ID}
    assert ENDOFTEXT_ID not in model.end_ids
    ids = [*model.encode_prompt("hello"), ord("7"), *model.encode_prompt("again")]
    assert run(model, [ids], last=None)[:2] == ("hello", STOP)
