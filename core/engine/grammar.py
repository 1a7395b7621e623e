"""Which tokens a grammar allows next, for every sampled place of a step.

Native code fills a mask in some microseconds, so most are filled where they are used: to wake a
thread for them takes longer on a machine that is busy. What takes long, a grammar's compilation or
one with many ways on, is done on a thread of its own while the model computes the step: what masks
depend on, the tokens so far, is known by then.

A matcher's state is a function of (grammar, output so far), so nothing must be kept: what a
preempted sequence lost, or a new rank never had, is made again by replaying the output.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from core.engine.allowed import Allowed, Scratch
from core.engine.plan import Row, SampleSpec, SequenceId
from core.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LONG_S = 0.004
"""Masks of a step that took longer than this, of one processor, are filled beside the next one."""
_GRAMMARS = 64
"""Compiled ones that are kept for further sequences."""


@dataclass(frozen=True, slots=True)
class Filled:
    """`allowed[n]`: of the n-th sampled place of the step. `broken`: sequences that cannot go on,
    and why."""

    allowed: Mapping[int, Allowed] = field(default_factory=dict)
    broken: Mapping[SequenceId, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Follower:
    """A matcher that has taken the tokens `taken` (int32 in native order)."""

    grammar: str
    matcher: LLMatcher
    taken: bytes


class _Broken(Exception):
    """The grammar cannot be followed; the message is for the log and never quotes the answer."""


class Filling:
    """The masks of a step, on their way or still to be filled."""

    def __init__(self, fill: Callable[[], Filled], future: Future[Filled] | None) -> None:
        self._fill = fill
        self._future = future

    def result(self) -> Filled:
        """Fills them here unless the other thread has begun."""
        if self._future is None or self._future.cancel():
            return self._fill()
        return self._future.result()


class Masks:
    """`tokens` gives the vocabulary when the first grammar comes; `sequences`: so many matchers are
    kept. One step's masks at a time."""

    def __init__(
        self, tokens: Callable[[], LLTokenizer], vocab_size: int, *, sequences: int
    ) -> None:
        self._make_tokens = tokens
        self._sequences = sequences
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._followers: OrderedDict[SequenceId, _Follower] = OrderedDict()
        self._words = 0
        self._fill_s = 0.0
        """What the last step's masks took, of one processor."""
        self._scratch = Scratch(vocab_size)

    @classmethod
    def of(cls, source: Path, vocab_size: int, max_sequences: int) -> Masks:
        """Those of a rank with the model at `source`. A grammar that comes raises ConfigError or
        UnsupportedField where the vocabulary cannot be read."""

        def tokens() -> LLTokenizer:
            from core.text.model import load_grammar_tokens  # 10 MB that most ranks never need

            return load_grammar_tokens(source, vocab_size)

        return cls(tokens, vocab_size, sequences=2 * max_sequences)

    def begin(self, rows: Sequence[Row]) -> Filling | None:
        """Start on the masks of a step; None when no row has a grammar. `rows` in the order of
        their logits, placeholders filled in."""
        held = [row for row in rows if row.sample is not None and row.sample.grammar]
        if not held:
            return None
        fill = partial(self._fill, rows)
        long = self._fill_s > LONG_S or any(row.sequence not in self._followers for row in held)
        return Filling(fill, self._worker.submit(fill) if long else None)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _fill(self, rows: Sequence[Row]) -> Filled:
        began = time.thread_time()
        allowed: dict[int, Allowed] = {}
        broken: dict[SequenceId, str] = {}
        place = 0
        for row in rows:
            if row.sample is None:
                continue
            if row.sample.grammar:
                try:
                    for n, mask in enumerate(self._of_row(row, row.sample)):
                        allowed[place + n] = mask
                except (_Broken, RequestError) as error:
                    self._followers.pop(row.sequence, None)
                    broken[row.sequence] = str(error)
            place += 1 + row.drafts
        self._fill_s = time.thread_time() - began
        return Filled(allowed, broken)

    def _of_row(self, row: Row, spec: SampleSpec) -> list[Allowed]:
        """One for the next token, and one after each guess up to the first that is forbidden: what
        is drawn behind that does not count."""
        matcher = self._follow(row.sequence, spec)
        masks: list[Allowed] = []
        ahead = 0
        for guess in (*row.token_ids[len(row.token_ids) - row.drafts :], None):
            masks.append(self._mask(matcher))
            if guess is None or guess not in masks[-1]:
                break
            if matcher.is_stopped() or not matcher.consume_token(guess):
                break
            ahead += 1
        if ahead and not matcher.rollback(ahead):
            raise _Broken("the grammar's matcher could not take guesses back")
        return masks

    def _mask(self, matcher: LLMatcher) -> Allowed:
        from llguidance.numpy import fill_next_token_bitmask  # see `of`

        words = np.empty((1, self._words), dtype=np.int32)
        fill_next_token_bitmask(matcher, words, 0)
        if matcher.is_error():
            raise _Broken("the grammar became too complex to follow")
        return Allowed(words.view(np.uint8)[0], self._scratch)

    def _follow(self, sequence: SequenceId, spec: SampleSpec) -> LLMatcher:
        """The sequence's matcher, which has taken its output so far."""
        assert spec.history is not None, "a grammar comes with a history"
        output = spec.history.tokens[spec.history.prompt * 4 :]
        follower = self._followers.get(sequence)
        if (
            follower is None
            or follower.grammar != spec.grammar
            or not output.startswith(follower.taken)
        ):
            follower = _Follower(spec.grammar, self._matcher(spec.grammar), b"")
            self._followers[sequence] = follower
            if len(self._followers) > self._sequences:
                self._followers.popitem(last=False)
        self._followers.move_to_end(sequence)
        fresh = array("i")
        fresh.frombytes(output[len(follower.taken) :])
        if fresh and not follower.matcher.consume_tokens(list(fresh)):
            raise _Broken("the answer so far does not fit its grammar")
        follower.taken = output
        return follower.matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        made = self._compiled.get(grammar)
        if made is None:
            from llguidance import LLMatcher  # see `of`

            from core.text.grammar import limits

            tokens = self._tokens
            if tokens is None:
                tokens = self._tokens = self._make_tokens()
                self._words = -(-tokens.vocab_size // 32)
            made = LLMatcher(tokens, grammar, log_level=0, limits=limits())
            if made.is_error():
                raise _Broken("the grammar cannot be compiled for this model")
            self._compiled[grammar] = made
            if len(self._compiled) > _GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return made.deep_copy()
