"""Which tokens a grammar forbids next, for every sampled place of a step.

Masks are filled on a thread of their own, in native code that leaves the interpreter, while the
model computes the step: what they depend on, the tokens so far, is known by then. A matcher's state
is a function of (grammar, output so far), so nothing must be kept: what a preempted sequence lost,
or a new rank never had, is made again by replaying the output.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor

from core.engine.plan import Row, SampleSpec, SequenceId
from core.errors import RequestError
from core.text.grammar import limits

_GRAMMARS = 64
"""Compiled ones that are kept for further sequences."""


@dataclass(frozen=True, slots=True)
class Filled:
    """`forbidden[n]`: fp32 [vocabulary] for the n-th sampled place of the step: −inf for what may
    not be chosen, +inf for all else, so that the least of it and the logits is what counts: far
    cheaper than filling by a mask of bits. `broken`: sequences that cannot go on, and why."""

    forbidden: Mapping[int, Tensor] = field(default_factory=dict)
    broken: Mapping[SequenceId, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Follower:
    """A matcher that has taken the tokens `taken` (int32 in native order)."""

    grammar: str
    matcher: LLMatcher
    taken: bytes


class _Broken(Exception):
    """The grammar cannot be followed; the message is for the log and never quotes the answer."""


class Masks:
    """`tokens` gives the vocabulary when the first grammar comes; `sequences`: so many matchers are
    kept. One step's masks at a time."""

    def __init__(
        self, tokens: Callable[[], LLTokenizer], vocab_size: int, *, sequences: int
    ) -> None:
        self._make_tokens = tokens
        self._vocab_size = vocab_size
        self._sequences = sequences
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._followers: OrderedDict[SequenceId, _Follower] = OrderedDict()
        self._words = np.empty((1, 0), dtype=np.int32)

    def begin(self, rows: Sequence[Row]) -> Future[Filled] | None:
        """Start on the masks of a step; None when no row has a grammar. `rows` in the order of
        their logits, placeholders filled in."""
        if not any(row.sample is not None and row.sample.grammar for row in rows):
            return None
        return self._worker.submit(self._fill, rows)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _fill(self, rows: Sequence[Row]) -> Filled:
        forbidden: dict[int, Tensor] = {}
        broken: dict[SequenceId, str] = {}
        place = 0
        for row in rows:
            if row.sample is None:
                continue
            if row.sample.grammar:
                try:
                    for n, mask in enumerate(self._of_row(row, row.sample)):
                        forbidden[place + n] = mask
                except (_Broken, RequestError) as error:
                    self._followers.pop(row.sequence, None)
                    broken[row.sequence] = str(error)
            place += 1 + row.drafts
        return Filled(forbidden, broken)

    def _of_row(self, row: Row, spec: SampleSpec) -> list[Tensor]:
        """One for the next token, and one after each guess up to the first that is forbidden: what
        is drawn behind that does not count."""
        matcher = self._follow(row.sequence, spec)
        masks: list[Tensor] = []
        ahead = 0
        for guess in (*row.token_ids[len(row.token_ids) - row.drafts :], None):
            masks.append(self._mask(matcher))
            if guess is None or masks[-1][guess] < 0:
                break
            if matcher.is_stopped() or not matcher.consume_token(guess):
                break
            ahead += 1
        if ahead and not matcher.rollback(ahead):
            raise _Broken("the grammar's matcher could not take guesses back")
        return masks

    def _mask(self, matcher: LLMatcher) -> Tensor:
        fill_next_token_bitmask(matcher, self._words, 0)
        if matcher.is_error():
            raise _Broken("the grammar became too complex to follow")
        bits = np.unpackbits(self._words.view(np.uint8)[0], bitorder="little")
        most = np.full(self._vocab_size, -np.inf, dtype=np.float32)
        known = most[: len(bits)]
        np.subtract(bits[: len(known)], 0.5, out=known, dtype=np.float32)
        known *= np.inf
        return torch.from_numpy(most)

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
            tokens = self._tokens
            if tokens is None:
                tokens = self._tokens = self._make_tokens()
                self._words = np.empty((1, -(-tokens.vocab_size // 32)), dtype=np.int32)
            made = LLMatcher(tokens, grammar, log_level=0, limits=limits())
            if made.is_error():
                raise _Broken("the grammar cannot be compiled for this model")
            self._compiled[grammar] = made
            if len(self._compiled) > _GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return made.deep_copy()
