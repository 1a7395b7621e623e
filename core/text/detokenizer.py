"""Token ids → text, piece by piece, so that the pieces joined are the decoding of all ids.

A piece never holds half a character: what is incomplete waits, and is given out at the end as the
whole decoding shows it. Special tokens print nothing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Protocol

from tokenizers import Tokenizer, decoders

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"


class Detokenizer(Protocol):
    """State of one answer."""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none."""
        ...

    def flush(self) -> str:
        """What was left incomplete, as replacement characters. Once, at the end."""
        ...

    def spell(self, token_id: int) -> bytes:
        """What `token_id` would add to the answer here, in UTF-8; half characters too."""
        ...

    @property
    def left(self) -> int:
        """Bytes that wait for the rest of their character."""
        ...


class TokenTable:
    """What each token of a model prints. One per model; it remembers what it has looked up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._bytes: dict[int, bytes] = {}

    def start(self) -> Detokenizer:
        """A detokenizer for one answer."""
        if isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return _ByteDetokenizer(self)
        return _WindowDetokenizer(self)

    def bytes_of(self, token_id: int) -> bytes:
        """Of a byte-level token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def hidden(self, token_id: int) -> bool:
        """Prints nothing: special, or a row of the embedding without a token."""
        return token_id in self._hidden or self._tokenizer.id_to_token(token_id) is None

    def name(self, token_id: int) -> str:
        """What the vocabulary calls it."""
        return self._tokenizer.id_to_token(token_id) or f"<token {token_id}>"

    def byte(self, token_id: int) -> bytes:
        """Of a byte token."""
        return bytes.fromhex(self.name(token_id)[3:5])

    def is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return b""
        try:
            return bytes(BYTE_OF[char] for char in token)
        except KeyError:  # an added token stands for its own text
            return token.encode()


class _ByteDetokenizer:
    """Byte-level vocabularies: a token is bytes, and UTF-8 says where characters end."""

    def __init__(self, table: TokenTable) -> None:
        self._bytes_of = table.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def spell(self, token_id: int) -> bytes:
        return self._bytes_of(token_id)

    @property
    def left(self) -> int:
        return len(self._utf8.getstate()[0])


class _WindowDetokenizer:
    """Any other vocabulary: decode what is new together with a little of what was printed.

    Byte tokens wait for the end of their run: a run is decoded as a whole, and one bad byte
    changes what its good ones print.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._printed: list[int] = []
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        if self._table.hidden(token_id):
            return ""
        self._new.append(token_id)
        if self._table.is_byte(token_id):
            return ""
        text = self._fresh()
        if text.endswith(_BROKEN):
            return ""
        self._printed, self._new = self._new, []
        return text

    def flush(self) -> str:
        text = self._fresh() if self._new else ""
        self._printed, self._new = self._new, []
        return text

    def spell(self, token_id: int) -> bytes:
        table = self._table
        if table.hidden(token_id):
            return b""
        if table.is_byte(token_id):
            return table.byte(token_id)
        before = self._printed + self._new
        return table.decode([*before, token_id])[len(table.decode(before)) :].encode()

    @property
    def left(self) -> int:
        return len(self._new)

    def _fresh(self) -> str:
        before = self._table.decode(self._printed)
        return self._table.decode(self._printed + self._new)[len(before) :]


def _byte_letters() -> Mapping[str, int]:
    """Byte-level vocabularies write each byte as one printable letter: Latin-1's own where it is
    printable, letters from U+0100 on, in order, for the others."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_letters()
