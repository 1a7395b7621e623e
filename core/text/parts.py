"""What a model's files say about its text, whichever form they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TextParts:
    """Read by `from_gguf` and `from_folder`; `model.TextModel` is built from it.

    `tokenizer` knows the model's added tokens, with the ids of the embedding.
    """

    tokenizer: Tokenizer
    context: int
    vocab_size: int
    """Rows of the embedding; may be more than the tokenizer has tokens."""
    end_ids: frozenset[int]
    """Any of them ends a turn: the union of what all the model's files say."""
    begin_id: int | None
    add_begin: bool
    """A raw prompt starts with the begin token."""
    chat_begin: bool
    """A chat starts with it even when its template does not write one."""
    template: str | None
    names: Mapping[str, str]
    """Texts of special tokens that templates ask for: bos_token, eos_token, …"""
    stretch: float = 1.0
    """So many times the context may be served when the topology asks for it (dynamic rope)."""
