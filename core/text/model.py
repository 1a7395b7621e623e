"""The text side of one model: what routers encode with and node fronts write with."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer

from core.errors import ContextLengthExceeded, InvalidRequest
from core.text import from_folder, from_gguf
from core.text.bound import TokenBound
from core.text.control import ChatEncoder, control_tokens, encode
from core.text.detokenizer import TokenTable
from core.text.grammar import grammar_of, grammar_tokens
from core.text.logprobs import LogprobLine
from core.text.parts import TextParts
from core.text.stop import StopMatcher
from core.text.template import ChatTemplate
from core.text.tools.formats import PLAIN, ToolFormat
from core.text.tools.reader import CallReader, call_ids
from core.text.writer import ChoiceWriter
from core.types import GenerateRequest, Message, Tool, ToolChoice


def load_text(path: Path) -> TextModel:
    """From a GGUF file, or a folder with tokenizer.json. Raises ConfigError.

    Neither weights nor torch are touched.
    """
    return TextModel(_read(path))


def load_grammar_tokens(path: Path, vocab_size: int) -> LLTokenizer:
    """The vocabulary alone, for whoever samples; `vocab_size`: columns of the logits. Raises
    ConfigError, UnsupportedField."""
    parts = _read(path)
    return grammar_tokens(parts.tokenizer, max(vocab_size, parts.vocab_size), parts.end_ids)


def _read(path: Path) -> TextParts:
    read = from_folder.read_text_parts if path.is_dir() else from_gguf.read_text_parts
    return read(path)


class TextModel:
    """Immutable once built and safe to share between threads; `writer` makes the state.

    `end_ids`: any of them ends a turn, from all the places where a model's files say so.
    """

    def __init__(self, parts: TextParts) -> None:
        controls = control_tokens(parts.tokenizer, parts.template)
        self.context = parts.context
        self.context_limit = int(parts.context * parts.stretch)
        self.vocab_size = parts.vocab_size
        self.end_ids = parts.end_ids
        self.control_ids = frozenset(controls)
        self.begin_id = parts.begin_id
        self.add_begin = parts.add_begin
        self._chat_begin = parts.chat_begin
        self._tokenizer = parts.tokenizer
        self._encoder = ChatEncoder(parts.tokenizer, controls)
        self._bound = TokenBound(parts.tokenizer)
        self._table = TokenTable(parts.tokenizer)
        self._grammar_lock = threading.Lock()
        self._grammar_tokens: LLTokenizer | None = None
        self._template = (
            None
            if parts.template is None
            else ChatTemplate(
                parts.template,
                parts.names,
                {token.content: token.special for token in controls.values()},
            )
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        rendered_at: int,
        at_most: int | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = ToolChoice.AUTO,
        forced_tool: str = "",
    ) -> list[int]:
        """Ids of a conversation up to where the assistant speaks.

        `rendered_at` (Unix seconds) is the template's now. Raises InvalidRequest, TemplateRefused,
        and ContextLengthExceeded for what surely has more than `at_most` tokens, before it is read.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template, which chat needs; send a prompt to "
                "/v1/completions instead",
                param="messages",
            )
        pieces = self._template.render(
            messages,
            rendered_at=rendered_at,
            tools=tools,
            choice=tool_choice,
            forced_tool=forced_tool,
        )
        if at_most is not None:
            self._refuse_unread("".join(piece.text for piece in pieces), at_most, "messages")
        ids = self._encoder.encode(pieces)
        return self._with_begin(ids, add=self._chat_begin)

    def encode_prompt(
        self, prompt: str | Sequence[int], *, at_most: int | None = None
    ) -> list[int]:
        """Ids of a raw prompt, in which the texts of special tokens mean those tokens.

        Ids are taken as they are once they are known to be in the vocabulary. Raises
        InvalidRequest, and ContextLengthExceeded for a text as `encode_chat` does.
        """
        if isinstance(prompt, str):
            if at_most is not None:
                self._refuse_unread(prompt, at_most, "prompt")
            ids = encode(self._tokenizer, prompt)
            ids = self._with_begin(ids, add=self.add_begin)
        else:
            ids = list(prompt)
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise InvalidRequest(
                        f"prompt has the token id {token_id}; this model's are 0 to "
                        f"{self.vocab_size - 1}",
                        param="prompt",
                    )
        if not ids:
            raise InvalidRequest("prompt is empty", param="prompt")
        return ids

    def writer(
        self, stops: tuple[str, ...], end_ids: frozenset[int], *, min_tokens: int = 0
    ) -> ChoiceWriter:
        """The writer of one choice. `end_ids`: the model's own, unless the caller ignores them,
        and the caller's. `min_tokens`: stop strings are not looked for in so many tokens."""
        return ChoiceWriter(
            self._table.start(),
            StopMatcher(stops),
            end_ids,
            LogprobLine(self._table),
            min_tokens=min_tokens,
        )

    def grammar(self, request: GenerateRequest) -> str:
        """What every token of an answer to `request` must fit; "" where anything may come.

        Raises InvalidRequest, or UnsupportedField naming the keyword that cannot be enforced.
        """
        return grammar_of(request, self._form, self.grammar_tokens)

    def grammar_tokens(self) -> LLTokenizer:
        """The vocabulary as grammars need it, made when first asked for. Raises UnsupportedField
        for a model whose answers cannot be held to a grammar."""
        with self._grammar_lock:
            if self._grammar_tokens is None:
                self._grammar_tokens = grammar_tokens(
                    self._tokenizer, self.vocab_size, self.end_ids
                )
            return self._grammar_tokens

    def calls(self, request: GenerateRequest, choice: int) -> CallReader | None:
        """Reads the calls of one choice out of its text; None where it may make none."""
        if not request.tools or request.tool_choice is ToolChoice.NONE:
            return None
        return CallReader(
            self._form,
            frozenset(tool.name for tool in request.tools),
            call_ids(request.id, choice),
            several=request.parallel_tool_calls,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids as an answer would show it: without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    @property
    def _form(self) -> ToolFormat:
        return PLAIN if self._template is None else self._template.form

    def _refuse_unread(self, text: str, at_most: int, param: str) -> None:
        least = self._bound.least_tokens(text)
        if least > at_most:
            raise ContextLengthExceeded(
                f"the prompt has at least {least} tokens; prompt and answer together may have"
                f" {at_most}",
                param=param,
            )

    def _with_begin(self, ids: list[int], *, add: bool) -> list[int]:
        """`ids` after one begin token if `add`; a text that brings its own gets no second one."""
        if add and self.begin_id is not None and ids[:1] != [self.begin_id]:
            return [self.begin_id, *ids]
        return ids
