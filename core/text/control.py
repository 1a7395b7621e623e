"""Rendered chats → token ids, without a caller's text ever becoming a control token.

The tokenizer has a twin of the same model and rules in which each control token has a secret name,
drawn at start. In the template's own words control tokens are replaced by those names, then the
whole chat is encoded at once by the twin: what a caller wrote as `<|im_start|>` is ordinary text to
it, and everything else (merges across borders, prefixes, stripping) happens as in the original.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer

from core.text.marks import Piece

_NAME_CHARS = 12
_PRIVATE = range(0xF0000, 0xF4000)
"""Private characters that no rule of a tokenizer knows; 14 bits each."""
_MARKUP = re.compile(r"[<\[{(｜].*[>\]})｜]", re.DOTALL)


def control_tokens(tokenizer: Tokenizer, template: str | None) -> dict[int, AddedToken]:
    """The added tokens that mean something to the model beyond their text.

    Special ones, ones the template writes, and ones that look like markup. Runs of white space and
    plain words that a tokenizer adds are ordinary text.
    """
    return {
        number: token
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
        or (
            not token.content.isspace()
            and (
                _MARKUP.fullmatch(token.content) is not None
                or (template is not None and token.content in template)
            )
        )
    }


class ChatEncoder:
    """Encodes pieces of a chat; `controls` as given by `control_tokens`."""

    def __init__(self, tokenizer: Tokenizer, controls: Mapping[int, AddedToken]) -> None:
        self._twin = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._twin.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._twin.pre_tokenizer = tokenizer.pre_tokenizer
        self._secret: dict[str, str] = {}
        self._twin_ids: dict[int, int] = {}
        self._controls = frozenset(controls)
        renamed: list[AddedToken] = []
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items()):
            name = token.content
            if number in controls:
                name = _secret_name()
                self._secret[token.content] = name
            twin = AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            renamed.append(twin)
        self._twin.add_tokens(renamed)
        for number, twin in zip(sorted(tokenizer.get_added_tokens_decoder()), renamed, strict=True):
            twin_id = self._twin.token_to_id(twin.content)
            if twin_id is not None:
                self._twin_ids[twin_id] = number
        longest_first = sorted(self._secret, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        text = "".join(
            self._found.sub(lambda found: self._secret[found[0]], piece.text)
            if piece.own
            else piece.text
            for piece in pieces
        )
        ids: list[int] = []
        for token in encode(self._twin, text):
            if token in self._controls and token not in self._twin_ids:
                ids += self._spelled(token)
            else:
                ids.append(self._twin_ids.get(token, token))
        return ids

    def _spelled(self, token: int) -> list[int]:
        """A control token that is also a whole word of the vocabulary, as its letters."""
        text = self._twin.id_to_token(token) or ""
        return [
            letter
            for char in text
            for letter in encode(self._twin, char)
            if letter not in self._controls
        ]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` and nothing around it. As a batch of one: only of batches does the library let
    other threads run meanwhile, and a long text takes seconds."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _secret_name() -> str:
    return "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_NAME_CHARS))
