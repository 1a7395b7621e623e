"""Prompts out of block hashes: what a trace does not publish, at a sixteenth of its length.

A block of 512 tokens, some 2 kB of text, becomes 128 characters that begin with its hash; equal
blocks give equal characters, so shared beginnings are as long, in proportion, as the trace's. One
block more at the end tells the backend what is no text: some routers drop every field of a request
that they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.prefix import HASH_BYTES

BLOCK_CHARS = 128
SHRUNK = 2048 // BLOCK_CHARS
"""How much shorter than real text: a router's limits on text are divided by it."""
_HEX = 2 * HASH_BYTES


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` and `answer_tokens`: its own length, and its answer's."""

    number: int
    tokens: int
    answer_tokens: int
    blocks: Sequence[bytes]

    def text(self) -> str:
        note = f"{self.number} {self.tokens} {self.answer_tokens}"
        blocks = (one.hex() * (BLOCK_CHARS // _HEX) for one in self.blocks)
        return "".join(blocks) + note.ljust(BLOCK_CHARS)


def read(text: str) -> Prompt:
    """Raises ValueError for a text that `Prompt.text` did not make."""
    end = len(text) - BLOCK_CHARS
    if end < 0 or end % BLOCK_CHARS:
        raise ValueError(f"a prompt of {len(text)} characters has no whole number of blocks")
    number, tokens, answer = (int(part) for part in text[end:].split())
    blocks = [bytes.fromhex(text[at : at + _HEX]) for at in range(0, end, BLOCK_CHARS)]
    return Prompt(number, tokens, answer, blocks)
