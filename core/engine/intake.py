"""From a spec to a sequence, or to the reason why this rank can never serve it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from core.engine.messages import SequenceSpec
from core.engine.plan import SequenceId
from core.engine.sequence import Sequence
from core.errors import ContextLengthExceeded, InvalidRequest, NoCapacity, RequestError
from core.kv.block_manager import BlockManager
from core.kv.prefix_cache import Hasher, TokenChain
from core.prefix import block_root
from core.types import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Limits:
    """`context`: the model's, in tokens of prompt and answer together."""

    context: int
    vocab_size: int
    max_sequences: int
    max_step_tokens: int
    mixed_step_s: float = 0.0
    """About how long a step may take that reads prompts while others decode; 0: any time."""
    stages: int = 1
    """Of a pipeline: as many steps are under way, of different sequences."""


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, math.inf),
    ("temperature", 0, math.inf),
    ("top_p", 0, 1),
    ("top_k", 0, math.inf),
    ("min_p", 0, 1),
    ("repetition_penalty", sys.float_info.min, math.inf),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("min_tokens", 0, math.inf),
    ("logprobs", 0, math.inf),
    ("deadline_s", 0, math.inf),
)


class Intake:
    """Numbers arrivals; `context` is what fits both the model and the pool, in tokens of prompt
    and answer."""

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        fingerprint: bytes,
        *,
        hasher: Hasher,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._hasher = hasher
        self._clock = clock
        self._pool_tokens = blocks.total * BLOCK_TOKENS
        self._arrivals = 0
        self.context = min(limits.context, self._pool_tokens)

    def make(
        self, sequence_id: SequenceId, spec: SequenceSpec, *, prefill_only: bool
    ) -> Sequence | RequestError:
        refused = refusal(
            spec,
            context=self._limits.context,
            pool_tokens=self._pool_tokens,
            vocab_size=self._limits.vocab_size,
        )
        if refused is not None:
            return refused
        tokens = [*spec.token_ids, *spec.output_ids]
        self._arrivals += 1
        root = block_root(self._fingerprint, spec.namespace)
        return Sequence(
            id=sequence_id,
            spec=spec,
            arrival=self._arrivals,
            prefill_only=prefill_only,
            tokens=tokens,
            chain=TokenChain(root, tokens, self._hasher),
            table=self._blocks.new_table(root),
            limit=min(len(spec.token_ids) + spec.max_tokens, self.context),
            deadline=None if spec.deadline_s is None else self._clock() + spec.deadline_s,
        )


def refusal(
    spec: SequenceSpec, *, context: int, pool_tokens: int, vocab_size: int
) -> RequestError | None:
    """Why this rank can never serve `spec`, if so. `context` is the model's, `pool_tokens` what
    the KV pool holds."""
    if not spec.token_ids:
        return InvalidRequest("the prompt has no tokens", param="prompt")
    for ids, param in ((spec.token_ids, "prompt"), (spec.output_ids, "resume")):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(one for one in ids if not 0 <= one < vocab_size)
            return InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {vocab_size}", param=param
            )
    for name, low, high in _RANGES:
        value = getattr(spec, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            return InvalidRequest(
                f"{name} is {value}; it must be a finite number in [{low:g}, {high:g}]", param=name
            )
    for token, bias in spec.logit_bias:
        if not (0 <= token < vocab_size and math.isfinite(bias)):
            return InvalidRequest(f"a bias of {bias} for token {token}", param="logit_bias")
    prompt = len(spec.token_ids)
    if prompt >= context:
        return ContextLengthExceeded(
            f"the prompt has {prompt} tokens; with at least one token of answer that is over the "
            f"context of {context}",
            param="prompt",
        )
    if prompt >= pool_tokens:
        return NoCapacity(
            f"the prompt has {prompt} tokens and this node's KV cache holds {pool_tokens}"
        )
    return None
