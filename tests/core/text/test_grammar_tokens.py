"""Vocabularies as grammars need them: the kinds that are known, and a refusal for the others."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from core.errors import UnsupportedField
from core.text.grammar import grammar_of, grammar_tokens
from core.text.model import TextModel
from core.text.parts import TextParts
from core.text.tools.formats import PLAIN
from core.types import GenerateRequest, ModelName, RequestId, ResponseFormat, Tool
from tests.core.text.walks import spell

END = 2


def pieces() -> Tokenizer:
    """Words with a mark for the space before them, and a token for each byte."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": END}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ["▁", *'abcdefghijklmnopqrstuvwxyz{}[]":,0123456789', "▁a"]:
        vocabulary.setdefault(piece, len(vocabulary))
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
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
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def asking() -> GenerateRequest:
    return GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0,
        response_format=ResponseFormat(schema='{"enum": ["é a", {"b": 1}]}'),
    )  # fmt: skip


def test_pieces_spell_with_their_spaces_and_bytes() -> None:
    tokenizer = pieces()
    tokens = grammar_tokens(tokenizer, tokenizer.get_vocab_size() + 5, frozenset({END}))
    grammar = grammar_of(asking(), PLAIN, lambda: tokens)
    known = tokenizer.get_vocab()
    ids = [known[one] for one in ('"', "<0xC3>", "<0xA9>", "▁a", '"')]
    assert spell(tokens, grammar, ids)[0]
    assert not spell(tokens, grammar, [known[one] for one in ("▁", '"')])[1]


@pytest.mark.parametrize(
    "model", [models.WordLevel({"a": 0, "b": 1}, unk_token="a"), models.WordPiece({"a": 0})]
)
def test_a_vocabulary_of_another_kind_is_refused(model: models.Model) -> None:
    with pytest.raises(UnsupportedField, match="tokenizer cannot be used"):
        grammar_tokens(Tokenizer(model), 2, frozenset({0}))


def test_a_model_that_cannot_end_is_refused_a_schema_and_nothing_else() -> None:
    parts = TextParts(
        tokenizer=pieces(), context=64, vocab_size=400, end_ids=frozenset(), begin_id=None,
        add_begin=False, chat_begin=False, template=None, names={},
    )  # fmt: skip
    text = TextModel(parts)
    with pytest.raises(UnsupportedField, match="no end token"):
        text.grammar(asking())
    offered = GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0, tools=(Tool(name="f"),)
    )
    assert text.grammar(offered) == ""
