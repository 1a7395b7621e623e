"""Log probabilities in OpenAI's two forms: a list of entries for chat, four lists for the other."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from core.events import TokenLogprob
from edge.api.openai_types import ChatLogprob, ChatLogprobs, TextLogprobs, TopLogprob


class TextOffsets:
    """Where each token of one answer begins, in characters; a token that goes on with a character
    begins where the character does."""

    def __init__(self) -> None:
        self._characters = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, entry: TokenLogprob) -> int:
        """Of the next one."""
        at = self._characters
        self._characters += len(self._utf8.decode(entry.utf8))
        return at


def chat_logprobs(entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=one.token,
                logprob=one.logprob,
                bytes=list(one.utf8),
                top_logprobs=[
                    TopLogprob(token=other.token, logprob=other.logprob, bytes=list(other.utf8))
                    for other in one.top
                ],
            )
            for one in entries
        ]
    )


def text_logprobs(entries: Iterable[TokenLogprob], offsets: TextOffsets) -> TextLogprobs:
    answer = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for one in entries:
        answer.tokens.append(_legacy(one))
        answer.token_logprobs.append(one.logprob)
        ranked = {_legacy(other): other.logprob for other in one.top}
        answer.top_logprobs.append(ranked | {_legacy(one): one.logprob})
        answer.text_offset.append(offsets.of(one))
    return answer


def _legacy(entry: TokenLogprob) -> str:
    """The form has text alone, so bytes that are no characters are told as such."""
    try:
        entry.utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.utf8)
    return entry.token
