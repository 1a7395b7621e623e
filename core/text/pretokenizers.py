"""How each kind of byte-level model cuts text before merging, by the kind's name in GGUF.

A tokenizer.json carries its own rules; a GGUF file only names them (`tokenizer.ggml.pre`). A kind
that is not listed is refused by name: a near miss would load, run and quietly read another text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from core.errors import ConfigError

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3 = rf"{_SUFFIXES}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_SUFFIXES}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_O200K = (
    rf"{_CAMEL}{_SUFFIXES}?|{_CAPITALS}{_SUFFIXES}?|\p{{N}}{{1,3}}|{_MARKS_AND_SLASHES}|{_SPACES}"
)
_TEKKEN = rf"{_CAMEL}|{_CAPITALS}|\p{{N}}|{_MARKS_AND_SLASHES}|{_SPACES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class PreKind:
    """`patterns` cut one after the other; empty: the rules of GPT-2.

    `whole_words`: a piece that is a token as it stands is not built from merges.
    `add_begin`: whether prompts start with the begin token when the file does not say.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    compose: bool = False
    """Unicode NFC first."""
    whole_words: bool = False
    add_begin: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(list(self._stages()))

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.compose else None

    def _stages(self) -> Iterator[pre_tokenizers.PreTokenizer]:
        if self.single_digits:
            yield pre_tokenizers.Digits(individual_digits=True)
        for pattern in self.patterns:
            yield pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        yield pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)


_PRE_KINDS: Mapping[PreKind, tuple[str, ...]] = {
    PreKind(): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"),
    PreKind(single_digits=True): (
        "smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b",
    ),
    PreKind(single_digits=True, compose=True): ("command-r",),
    PreKind((_LLAMA3,), whole_words=True, add_begin=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral",
    ),
    PreKind((_LLAMA3,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    PreKind((_QWEN2,), compose=True): ("qwen2", "deepseek-r1-qwen"),
    PreKind((_QWEN2,)): ("stablelm2", "hunyuan"),
    PreKind((_QWEN35,), compose=True): ("qwen35",),
    PreKind((_O200K,)): ("gpt-4o", "llama4"),
    PreKind((_TEKKEN,), whole_words=True, add_begin=True): ("tekken",),
    PreKind(_DEEPSEEK3): ("deepseek-v3",),
}  # fmt: skip


def pre_kind(name: str) -> PreKind:
    """The rules named `name`. Raises ConfigError for a kind that is not known."""
    for kind, names in _PRE_KINDS.items():
        if name in names:
            return kind
    known = ", ".join(sorted(name for names in _PRE_KINDS.values() for name in names))
    raise ConfigError(f"pre-tokenizer {name!r} is not supported; known are {known}")
