"""Random answers that a grammar allows: what a model without any sense might write."""

from __future__ import annotations

import functools
import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from core.text.grammar import grammar_tokens, limits
from tests.tiny_text import IM_END_ID, tiny_tokenizer

_CLOSERS = [ord(char) for char in '"}]']


@functools.cache
def vocabulary() -> LLTokenizer:
    tokenizer = tiny_tokenizer()
    return grammar_tokens(tokenizer, tokenizer.get_vocab_size(), frozenset({IM_END_ID}))


def walk(tokens: LLTokenizer, grammar: str, seed: int, *, most: int = 400) -> str | None:
    """The text of one answer; None when it does not end within `most` tokens."""
    dice = random.Random(seed)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    words = np.empty((1, -(-tokens.vocab_size // 32)), dtype=np.int32)
    taken: list[int] = []
    for step in range(most):
        fill_next_token_bitmask(matcher, words, 0)
        bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")
        allowed = np.flatnonzero(bits[: tokens.vocab_size]).tolist()
        assert allowed, "nothing may follow"
        if IM_END_ID in allowed and (len(allowed) == 1 or dice.random() < 0.5):
            return tokens.decode_bytes(taken).decode()
        allowed = [one for one in allowed if one != IM_END_ID]
        closers = [one for one in _CLOSERS if one in allowed]
        hurry = 0.2 if step < 60 else 0.8
        token = dice.choice(closers if closers and dice.random() < hurry else allowed)
        assert matcher.consume_token(token), "an allowed token was refused"
        taken.append(token)
    return None


def spell(tokens: LLTokenizer, grammar: str, text: str | list[int]) -> tuple[bool, int]:
    """Does the grammar take `text` whole, byte by byte or id by id? And how much of it."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode()) if isinstance(text, str) else text
    taken = matcher.try_consume_tokens(data)
    return taken == len(data) and matcher.is_accepting(), taken
