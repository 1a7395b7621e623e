"""From what a caller asked for to what the engine does: no defaults are left to decide. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.engine.messages import SequenceSpec
from core.errors import ContextLengthExceeded, InvalidRequest
from core.types import GenerateRequest, Sampling


def sequence_specs(
    request: GenerateRequest,
    token_ids: Sequence[int],
    *,
    context: int,
    vocab_size: int,
    end_ids: frozenset[int],
    deadline_s: float | None = None,
    move_min_tokens: int = 0,
) -> tuple[SequenceSpec, ...]:
    """One for each choice. `end_ids`: the model's own end tokens; `deadline_s`: the time left.
    `move_min_tokens`: from so many lost tokens on, a preempted one goes on elsewhere.
    Raises InvalidRequest, ContextLengthExceeded.

    The router has refused what does not fit before; a node that is reached by a faulty router
    must still not bring its engine down with an id outside the vocabulary.
    """
    sampling = request.sampling
    count = len(token_ids)
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    for param, ids in (
        ("prompt", token_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("resume", [token for point in request.resume for token in point.token_ids]),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"token ids must be in 0 … {vocab_size - 1}", param=param)
    if sampling.n < 1:
        raise InvalidRequest("there must be at least one choice", param="n")
    room = context - count
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {count} tokens and the model's context is {context}"
        )
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {count} tokens, {sampling.max_tokens} more are asked for, "
            f"and the model's context is {context}"
        )
    first = SequenceSpec(
        token_ids=tuple(token_ids),
        namespace=request.namespace,
        max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        stop_ids=frozenset(sampling.stop_token_ids)
        | (frozenset() if sampling.ignore_eos and not request.grammar else end_ids),
        priority=request.priority,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        grammar=request.grammar,
        deadline_s=deadline_s,
        move_min_tokens=move_min_tokens if _movable(sampling) else 0,
    )
    written = {point.choice: point.token_ids for point in request.resume}
    return tuple(
        msgspec.structs.replace(first, choice=choice, output_ids=written.get(choice, ()))
        for choice in range(sampling.n)
    )


def _movable(sampling: Sampling) -> bool:
    """Can an answer go on at another node in mid-text? Choices share the blocks of their prompt, so
    one that is preempted finds them again here; and log probabilities that wait for the end of a
    character or of a possible stop string are not to be had from the tokens."""
    return sampling.n == 1 and sampling.logprobs is None
