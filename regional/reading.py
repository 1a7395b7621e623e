"""From a request's text to token ids and block hashes; refuses what no node should ever see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from core.config import Topology
from core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from core.nearest import did_you_mean
from core.prefix import block_hashes, block_root
from core.types import (
    BLOCK_TOKENS,
    GenerateRequest,
    Message,
    ModelName,
    ResumePoint,
    Sampling,
    Tool,
    ToolChoice,
)

OFF_LOOP_CHARS = 4096
"""A prompt longer than this is encoded in a thread: it would hold up every stream for over 1 ms."""
HUGE_CHARS = 65536
"""Prompts longer than this have threads of their own, so that shorter ones need not wait long."""
READERS = 2
"""Threads that read long prompts, and as many for huge ones."""
_TURN_CHARS = 64
"""What a template takes for a turn, in characters of text that take as long."""


class TextModel(Protocol):
    """What reading needs of core.text.model.TextModel."""

    @property
    def context(self) -> int: ...

    @property
    def context_limit(self) -> int:
        """The most that a topology may ask for."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        rendered_at: int,
        at_most: int | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = ToolChoice.AUTO,
        forced_tool: str = "",
    ) -> list[int]: ...

    def encode_prompt(
        self, prompt: str | Sequence[int], *, at_most: int | None = None
    ) -> list[int]: ...

    def grammar(self, request: GenerateRequest) -> str: ...


class Reading:
    """A request that was read: `request` has the model's canonical name, the grammar of its answer
    and nothing left of its text, nor of what the edge said about it for the region alone."""

    def __init__(self, request: GenerateRequest, token_ids: list[int]) -> None:
        self.request = request
        self.token_ids = token_ids
        self._hashes: dict[bytes, list[bytes]] = {}

    @property
    def output_ids(self) -> tuple[int, ...]:
        """What was generated before, where the answer is to go on: read together with the prompt.
        Of several choices, the first one's."""
        return next((one.token_ids for one in self.request.resume if one.choice == 0), ())

    def continued(self, token_ids: Sequence[int], chars_sent: int) -> Reading:
        """The same request, whose only choice stands there by now."""
        point = ResumePoint(choice=0, token_ids=tuple(token_ids), chars_sent=chars_sent)
        request = msgspec.structs.replace(self.request, resume=(point,))
        return Reading(request, self.token_ids)

    def hashes(self, fingerprint: bytes) -> list[bytes]:
        """Of the full blocks among the first n−1 tokens: what prefill makes and decode may hold."""
        known = self._hashes.get(fingerprint)
        if known is None:
            tokens = [*self.token_ids, *self.output_ids]
            whole = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            root = block_root(fingerprint, self.request.namespace)
            known = self._hashes[fingerprint] = block_hashes(root, tokens[:whole])
        return known


class Reader:
    """Reads the requests of one region. `texts` has an entry for each model that it serves.
    Its threads start with the first long prompt; `close` ends them."""

    def __init__(self, topology: Topology, texts: Mapping[ModelName, TextModel]) -> None:
        self._topology = topology
        self._texts = texts
        self._long = ThreadPoolExecutor(READERS, "read-long")
        self._huge = ThreadPoolExecutor(READERS, "read-huge")

    def close(self) -> None:
        """Nothing is read any more; a thread ends with the prompt that it reads."""
        for pool in (self._long, self._huge):
            pool.shutdown(wait=False, cancel_futures=True)

    def take(self, topology: Topology, texts: Mapping[ModelName, TextModel]) -> None:
        """What is read from now on; what is being read goes on as it was."""
        self._topology = topology
        self._texts = texts

    def context(self, model: ModelName) -> int:
        """Tokens of prompt and answer together."""
        configured = self._topology.models[model].context
        text = self._texts[model]
        return min(text.context_limit, configured) if configured else text.context

    async def read(self, request: GenerateRequest) -> Reading:
        """Raises ModelNotFound, InvalidRequest, TemplateRefused or ContextLengthExceeded; and
        UnsupportedField for a schema that the answer could not be held to."""
        model = self._model(request.model)
        text = self._texts[model]
        context = self.context(model)
        _known_ids(request.sampling, text.vocab_size)
        _few_turns(request, context)
        if request.prompt is not None and not isinstance(request.prompt, str):
            self._fitting(request, len(request.prompt), context)  # ids need no reading to be many
        size = _size(request)
        if size > OFF_LOOP_CHARS or _formed(request):
            pool = self._huge if size > HUGE_CHARS else self._long
            loop = asyncio.get_running_loop()
            grammar, token_ids = await loop.run_in_executor(pool, _encode, text, request, context)
        else:
            grammar, token_ids = _encode(text, request, context)
        bare = msgspec.structs.replace(
            request,
            model=model,
            messages=(),
            prompt=None,
            sampling=self._fitting(request, len(token_ids), context),
            route_chain=b"",
            route_ends=(),
            tools=tuple(Tool(name=tool.name) for tool in request.tools),
            response_format=None,
            grammar=grammar,
        )
        return Reading(bare, token_ids)

    def _model(self, name: str) -> ModelName:
        model = self._topology.canonical_model(name)
        if model is not None and model in self._texts:
            return model
        known = [
            label
            for model in self._texts
            for label in (model, *self._topology.models[model].aliases)
        ]
        hint = did_you_mean(name, known, f"there are: {', '.join(known)}")
        raise ModelNotFound(f"no model {name!r} here; {hint}", param="model")

    def _fitting(self, request: GenerateRequest, prompt: int, context: int) -> Sampling:
        """The request's sampling with a limit that the context has room for."""
        param = "messages" if request.messages else "prompt"
        if prompt == 0:
            raise InvalidRequest("the prompt has no tokens", param=param)
        sampling = request.sampling
        wanted = sampling.max_tokens
        if wanted and sampling.max_tokens_yields:
            wanted = min(wanted, max(1, context - prompt))
        if prompt >= context or prompt + (wanted or 0) > context:
            asked = f" and an answer of {wanted} tokens was asked for" if wanted else ""
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens{asked}; prompt and answer together"
                f" may have {context}",
                param=param,
            )
        if prompt + sampling.min_tokens > context:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens and at least {sampling.min_tokens} more are asked"
                f" for; prompt and answer together may have {context}",
                param="min_tokens",
            )
        return msgspec.structs.replace(sampling, max_tokens=wanted, max_tokens_yields=False)


def _known_ids(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidRequest for ids that the model does not have."""
    biased = [token_id for token_id, _ in sampling.logit_bias]
    for field, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biased)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"'{field}' has the token id {token_id}; this model's are 0 to"
                    f" {vocab_size - 1}",
                    param=field,
                )


def _few_turns(request: GenerateRequest, context: int) -> None:
    """Raises ContextLengthExceeded for more turns and calls than the context has tokens: rendering
    them takes longer than anything that could come of it."""
    turns = len(request.messages)
    if turns <= context:
        turns += sum(len(message.tool_calls) for message in request.messages)
    if turns > context:
        raise ContextLengthExceeded(
            f"the conversation has {turns} messages and calls; prompt and answer together may have"
            f" {context} tokens",
            param="messages",
        )


def _encode(text: TextModel, request: GenerateRequest, context: int) -> tuple[str, list[int]]:
    """The grammar of the answer and the ids of the prompt."""
    if request.prompt is not None:
        return "", text.encode_prompt(request.prompt, at_most=context)
    grammar = text.grammar(request) if _formed(request) else ""
    for field in ("ignore_eos", "min_tokens"):
        if grammar and getattr(request.sampling, field):
            raise InvalidRequest(
                f"'{field}' cannot be kept where a schema says how the answer ends", param=field
            )
    token_ids = text.encode_chat(
        request.messages,
        rendered_at=request.rendered_at,
        at_most=context,
        tools=request.tools,
        tool_choice=request.tool_choice,
        forced_tool=request.forced_tool,
    )
    return grammar, token_ids


def _formed(request: GenerateRequest) -> bool:
    """Is there anything that an answer may have to be held to?"""
    return bool(request.tools) or request.response_format is not None


def _size(request: GenerateRequest) -> int:
    """How much there is to read, in characters; a token id counts as one: it is only checked."""
    return (
        len(request.prompt or ())
        + sum(
            _TURN_CHARS + len(m.content or "") + sum(len(call.arguments) for call in m.tool_calls)
            for m in request.messages
        )
        + sum(len(tool.description) + len(tool.parameters) for tool in request.tools)
    )
