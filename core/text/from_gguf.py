"""Text parts out of a GGUF file: its vocabulary and merges become a `tokenizers` object.

Two kinds of vocabulary are read: `gpt2` (bytes, merges in the file) and `llama` (pieces with
scores, where merges follow from the scores). Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from core.errors import ConfigError
from core.models.gguf import GGUFValue, read_gguf
from core.text.parts import TextParts
from core.text.pretokenizers import PreKind, pre_kind

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_T = TypeVar("_T")


def read_text_parts(path: Path) -> TextParts:
    """Raises ConfigError for a vocabulary that we do not read exactly."""
    file = read_gguf(path)
    try:
        return _parts(_Keys(path, file.metadata))
    finally:
        file.close()


@dataclass(frozen=True, slots=True)
class _Keys:
    """Typed access to metadata; a wrong type is the file's fault."""

    path: Path
    metadata: Mapping[str, GGUFValue]

    def maybe(self, key: str, kind: type[_T]) -> _T | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{self.path}: {key!r} is a {type(value).__name__}")
        return value

    def need(self, key: str, kind: type[_T]) -> _T:
        value = self.maybe(key, kind)
        if value is None:
            raise ConfigError(f"{self.path} carries no tokenizer: {key!r} is missing")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.need(key, tuple)
        return tuple(value for value in values if isinstance(value, str))

    def id(self, name: str, vocab_size: int) -> int | None:
        value = self.maybe(f"tokenizer.ggml.{name}", int)
        return value if value is not None and 0 <= value < vocab_size else None


def _parts(keys: _Keys) -> TextParts:
    kind = keys.need("tokenizer.ggml.model", str)
    tokens = keys.texts("tokenizer.ggml.tokens")
    if kind == "gpt2":
        name = keys.maybe("tokenizer.ggml.pre", str)
        if name is None:
            raise ConfigError(f"{keys.path} does not say how it cuts text (tokenizer.ggml.pre)")
        pre = pre_kind(name)
        tokenizer, add_begin = _byte_level(keys, tokens, pre), pre.add_begin
    elif kind == "llama":
        tokenizer, add_begin = _pieces(keys, tokens), True
    else:
        raise ConfigError(f"{keys.path}: tokenizer model {kind!r} is not supported")
    tokenizer.add_tokens(list(_added(keys, tokens)))
    said = keys.maybe("tokenizer.ggml.add_bos_token", bool)
    begin_id = keys.id("bos_token_id", len(tokens))
    add_begin = begin_id is not None and (add_begin if said is None else said)
    ends = (keys.id(name, len(tokens)) for name in _END_KEYS)
    ids = {name: keys.id(f"{short}_token_id", len(tokens)) for short, name in _NAMES.items()}
    architecture = keys.need("general.architecture", str)
    return TextParts(
        tokenizer=tokenizer,
        context=keys.need(f"{architecture}.context_length", int),
        vocab_size=len(tokens),
        end_ids=frozenset(end for end in ends if end is not None),
        begin_id=begin_id,
        add_begin=add_begin,
        chat_begin=add_begin,
        template=keys.maybe("tokenizer.chat_template", str),
        names={name: tokens[token] for name, token in ids.items() if token is not None},
    )


def _byte_level(keys: _Keys, tokens: tuple[str, ...], pre: PreKind) -> Tokenizer:
    merges = [_pair(merge) for merge in keys.texts("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{keys.path}: vocabulary and merges do not fit: {error}") from error
    tokenizer = Tokenizer(model)
    normalizer = pre.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """A merge is two tokens around a space; the first may itself begin with one."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _pieces(keys: _Keys, tokens: tuple[str, ...]) -> Tokenizer:
    scores = keys.need("tokenizer.ggml.scores", tuple)
    if len(scores) != len(tokens):
        raise ConfigError(f"{keys.path}: {len(tokens)} tokens have {len(scores)} scores")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = keys.id("unknown_token_id", len(tokens))
    model = models.BPE(
        vocabulary,
        list(_merges_by_score(vocabulary, [float(score) for score in scores])),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = keys.maybe("tokenizer.ggml.add_space_prefix", bool) is not False
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges_by_score(
    vocabulary: Mapping[str, int], scores: list[float]
) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two others, the best scored token first."""
    for token, _ in sorted(vocabulary.items(), key=lambda item: -scores[item[1]]):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _added(keys: _Keys, tokens: tuple[str, ...]) -> Iterator[AddedToken]:
    kinds = keys.maybe("tokenizer.ggml.token_type", tuple) or ()
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            yield AddedToken(token, special=kind == _CONTROL, normalized=False)
