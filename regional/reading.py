"""From a request's text to token ids and block hashes; refuses what no node should ever see."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from core.config import Topology
from core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from core.prefix import block_hashes, block_root
from core.types import BLOCK_TOKENS, GenerateRequest, Message, ModelName, Sampling

OFF_LOOP_CHARS = 4096
"""A prompt longer than this is encoded in a thread: it would hold up every stream for over 1 ms."""


class TextModel(Protocol):
    """What reading needs of core.text.model.TextModel."""

    @property
    def context(self) -> int: ...

    def encode_chat(self, messages: Sequence[Message], *, rendered_at: int) -> list[int]: ...

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]: ...


class Reading:
    """A request that was read: `request` has the model's canonical name and no text left."""

    def __init__(self, request: GenerateRequest, token_ids: list[int]) -> None:
        self.request = request
        self.token_ids = token_ids
        self._hashes: dict[bytes, list[bytes]] = {}

    def hashes(self, fingerprint: bytes) -> list[bytes]:
        """Of the full blocks among the first n−1 tokens: what prefill makes and decode may hold."""
        known = self._hashes.get(fingerprint)
        if known is None:
            whole = (len(self.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            root = block_root(fingerprint, self.request.namespace)
            known = self._hashes[fingerprint] = block_hashes(root, self.token_ids[:whole])
        return known


class Reader:
    """Reads the requests of one region. `texts` has an entry for each model that it serves."""

    def __init__(self, topology: Topology, texts: Mapping[ModelName, TextModel]) -> None:
        self._topology = topology
        self._texts = texts

    def context(self, model: ModelName) -> int:
        """Tokens of prompt and answer together."""
        configured = self._topology.models[model].context
        own = self._texts[model].context
        return min(own, configured) if configured else own

    async def read(self, request: GenerateRequest) -> Reading:
        """Raises ModelNotFound, InvalidRequest, TemplateRefused or ContextLengthExceeded."""
        model = self._model(request.model)
        text = self._texts[model]
        if _chars(request) > OFF_LOOP_CHARS:
            token_ids = await asyncio.to_thread(_encode, text, request)
        else:
            token_ids = _encode(text, request)
        sampling = self._fitting(request, len(token_ids), self.context(model))
        bare = msgspec.structs.replace(
            request, model=model, messages=(), prompt=None, sampling=sampling
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
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ModelNotFound(
            f"no model {name!r} here; the nearest name is {near[0]!r}", param="model"
        )

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
        return msgspec.structs.replace(sampling, max_tokens=wanted, max_tokens_yields=False)


def _encode(text: TextModel, request: GenerateRequest) -> list[int]:
    if request.prompt is not None:
        return text.encode_prompt(request.prompt)
    return text.encode_chat(request.messages, rendered_at=request.rendered_at)


def _chars(request: GenerateRequest) -> int:
    """Length of the text; token ids count as a character each, for they are only checked."""
    return len(request.prompt or ()) + sum(len(m.content or "") for m in request.messages)
