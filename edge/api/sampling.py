"""The fields of OpenAI's bodies that say how tokens are chosen, as a `Sampling`.

Ranges that a schema can say are said in `openai_types`; here is what needs more than one field, or
must name a key. Whether an id is in the model's vocabulary is for the region to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from core.errors import InvalidRequest
from core.types import Sampling
from edge.api.openai_types import MAX_BIAS, ChatBody, CompletionBody

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for the legacy route; chat runs to the end of the turn."""
MAX_STOPS = 4
_INT32 = 2**31 - 1
_KEY = re.compile("(?:0|[1-9][0-9]{0,9})")
"""An id as JSON text, in one spelling, so that no id can come twice."""


def sampling(
    body: ChatBody | CompletionBody, limit: int | None, default: int | None = None
) -> Sampling:
    """`limit`: the caller's, in tokens; `default`: where there is none. Raises InvalidRequest."""
    yields = limit is None and default is not None
    if yields:
        limit = default
    least = body.min_tokens or 0
    if limit is not None and least > limit:
        raise InvalidRequest(
            f"'min_tokens' is {least}, and the answer may have {limit} tokens.", param="min_tokens"
        )
    return Sampling(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=min(max(body.top_k or 0, 0), _INT32),  # -1 elsewhere means what 0 means here
        max_tokens=None if limit is None else min(limit, _INT32),  # beyond: over any context
        max_tokens_yields=yields,
        stop=_stops(body.stop),
        stop_token_ids=token_ids(body.stop_token_ids or (), "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=_bias(body.logit_bias or {}),
        min_tokens=min(least, _INT32),
        n=body.n or 1,
        logprobs=_logprobs(body),
    )


def token_ids(ids: Sequence[object], field: str) -> tuple[int, ...]:
    """Ids that fit the wire. Raises InvalidRequest."""
    good: list[int] = []
    for one in ids:
        if not isinstance(one, int):
            raise InvalidRequest(f"'{field}' mixes token ids with something else.", param=field)
        if not 0 <= one <= _INT32:
            raise InvalidRequest(f"'{field}': {one} is no token id.", param=field)
        good.append(one)
    if not good and field == "prompt":
        raise InvalidRequest("'prompt' is empty.", param=field)
    return tuple(good)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' holds more than {MAX_STOPS} texts.", param="stop")
    if "" in stops:
        raise InvalidRequest("'stop' holds an empty text.", param="stop")
    return stops


def _bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for key, value in bias.items():
        if not _KEY.fullmatch(key) or int(key) > _INT32:
            raise InvalidRequest(f"'logit_bias': {key[:40]!r} is no token id.", param="logit_bias")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(
                f"'logit_bias': {value:g} for token {key} is not within {-MAX_BIAS} … {MAX_BIAS}.",
                param="logit_bias",
            )
        pairs.append((int(key), value))
    return tuple(pairs)


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(
            "'top_logprobs' is allowed only together with 'logprobs': true.", param="top_logprobs"
        )
    return (body.top_logprobs or 0) if body.logprobs else None
