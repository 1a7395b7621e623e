"""From what a caller asked for to what the engine does: no defaults are left to decide. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from core.engine.messages import SequenceSpec
from core.errors import ContextLengthExceeded, InvalidRequest
from core.types import GenerateRequest


def sequence_spec(
    request: GenerateRequest,
    token_ids: Sequence[int],
    *,
    context: int,
    vocab_size: int,
    end_ids: frozenset[int],
) -> SequenceSpec:
    """`end_ids`: the model's own end tokens. Raises InvalidRequest, ContextLengthExceeded.

    The router has refused what does not fit before; a node that is reached by a faulty router
    must still not bring its engine down with an id outside the vocabulary.
    """
    sampling = request.sampling
    count = len(token_ids)
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest(f"token ids must be in 0 … {vocab_size - 1}", param="prompt")
    if any(not 0 <= token < vocab_size for token in sampling.stop_token_ids):
        raise InvalidRequest(f"token ids must be in 0 … {vocab_size - 1}", param="stop_token_ids")
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
    output = next((point.token_ids for point in request.resume if point.choice == 0), ())
    return SequenceSpec(
        token_ids=tuple(token_ids),
        output_ids=output,
        namespace=request.namespace,
        max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed,
        choice=0,
        stop_ids=frozenset(sampling.stop_token_ids)
        | (frozenset() if sampling.ignore_eos else end_ids),
        priority=request.priority,
    )
