"""How few tokens a text can give: what lets a text that is far too long be refused unread.

The bound is proved for tokenizers in which every byte of the text ends in some token (bytes as
letters, or byte fallback) and whose rules only cut, or put other letters in their place. For any
other `least_tokens` is 0, and its texts are read to the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer, models

from core.text.detokenizer import BYTE_OF

_SHRINK = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Prepend": 1}
"""Normalizer → how many bytes of UTF-8 it may make one of. Unicode's worst are a letter that has a
shorter form, with its marks: eight bytes become two."""
_UTF8 = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]
"""The bytes that UTF-8 has."""
_CUTTERS = frozenset({"ByteLevel", "Digits", "Metaspace"})


@dataclass(frozen=True, slots=True)
class _Rule:
    """`longest`: bytes of text that one token may stand for. `dropped`: bytes that the vocabulary
    lacks, which vanish without a token."""

    longest: int
    dropped: bytes = b""


class TokenBound:
    """What is known of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._rule = _rule(tokenizer)

    def least_tokens(self, text: str) -> int:
        """`text` gives at least so many tokens."""
        if self._rule is None:
            return 0
        data = text.encode(errors="surrogatepass").translate(None, self._rule.dropped)
        return -(-len(data) // self._rule.longest)


def _rule(tokenizer: Tokenizer) -> _Rule | None:
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    shrink = _shrink(_state(tokenizer.normalizer))
    cuts = _cuts(_state(tokenizer.pre_tokenizer))
    added = tokenizer.get_added_tokens_decoder().values()
    if shrink is None or cuts is None or any(one.lstrip or one.rstrip for one in added):
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if "ByteLevel" in cuts:
        letters = {byte: letter for letter, byte in BYTE_OF.items()}
        longest = max(map(len, vocabulary), default=0)  # a letter is a byte
    elif model.byte_fallback:
        letters = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        longest = max((len(token.encode()) for token in vocabulary), default=0)
    else:
        return None
    lacking = {byte for byte in _UTF8 if letters[byte] not in vocabulary}
    plain = "ByteLevel" in cuts and tokenizer.normalizer is None and model.unk_token is None
    if lacking and not plain:
        return None  # what the text is made into may vanish, or be one unknown token together
    longest = max([longest, 1, *(len(one.content.encode()) for one in added)])
    return _Rule(shrink * longest, bytes(sorted(lacking)))


def _state(part: Any) -> dict[str, Any] | None:
    """The rules of a normalizer or pre-tokenizer as the library writes them; None without."""
    return None if part is None else msgspec.json.decode(part.__getstate__(), type=dict[str, Any])


def _shrink(rule: dict[str, Any] | None) -> int | None:
    """Bytes of text that one byte of a normalizer's result may stand for; None: unknown."""
    if rule is None:
        return 1
    if rule["type"] == "Sequence":
        whole = 1
        for one in rule["normalizers"]:
            shrink = _shrink(one)
            if shrink is None:
                return None
            whole *= shrink
        return whole
    if rule["type"] == "Replace":
        found, put = rule["pattern"].get("String"), rule["content"]
        return 1 if found and len(put.encode()) >= len(found.encode()) else None
    return _SHRINK.get(rule["type"])


def _cuts(rule: dict[str, Any] | None) -> set[str] | None:
    """The kinds of a pre-tokenizer's stages; None when one of them may drop text."""
    if rule is None:
        return set()
    kind = rule["type"]
    if kind == "Sequence":
        kinds: set[str] = set()
        for one in rule["pretokenizers"]:
            cuts = _cuts(one)
            if cuts is None:
                return None
            kinds |= cuts
        return kinds
    keeps = kind in _CUTTERS or (kind == "Split" and rule["behavior"] != "Removed")
    return {kind} if keeps else None
