"""Text parts out of a model folder: tokenizer.json and the small JSON files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from core.errors import ConfigError
from core.text.parts import TextParts

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_NO_LIMIT = 1 << 20
"""Context of a model whose config does not name one."""


class _Special(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    add_bos_token: bool | None = None
    bos_token: str | _Special | None = None
    eos_token: str | _Special | None = None
    unk_token: str | _Special | None = None
    pad_token: str | _Special | None = None
    sep_token: str | _Special | None = None
    cls_token: str | _Special | None = None


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None


class _Config(msgspec.Struct):
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | list[int] | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None


def read_text_parts(folder: Path) -> TextParts:
    """Raises ConfigError for files that are missing or do not parse."""
    tokenizer = _tokenizer(folder / "tokenizer.json")
    config = _read(folder / "config.json", _Config)
    generation = _read(folder / "generation_config.json", _Config)
    own = _read(folder / "tokenizer_config.json", _TokenizerConfig)
    names = dict(_names(own))
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    vocab_size = max(config.vocab_size or 0, known)
    ends = {*_ids(generation.eos_token_id), *_ids(config.eos_token_id)}
    eos = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if eos is not None:
        ends.add(eos)
    begin_id, add_begin = _begin(tokenizer, own, config, names)
    return TextParts(
        tokenizer=tokenizer,
        context=config.max_position_embeddings or _NO_LIMIT,
        vocab_size=vocab_size,
        end_ids=frozenset(end for end in ends if 0 <= end < vocab_size),
        begin_id=begin_id,
        add_begin=add_begin,
        chat_begin=False,  # as the model's authors do it: the template alone decides
        template=_template(folder, own),
        names=names,
        stretch=_stretch(config),
    )


def _stretch(config: _Config) -> float:
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    dynamic = (rope.rope_type or rope.type) == "dynamic"
    return max(1.0, rope.factor or 1.0) if dynamic else 1.0


def _tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()  # a stored limit would cut prompts without a word
    tokenizer.no_padding()
    return tokenizer


_S = TypeVar("_S", _TokenizerConfig, _Config)


def _read(path: Path, kind: type[_S]) -> _S:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _names(own: _TokenizerConfig) -> Iterator[tuple[str, str]]:
    for name in _SPECIAL_NAMES:
        value: str | _Special | None = getattr(own, name)
        if value is not None:
            yield name, value if isinstance(value, str) else value.content


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else value


def _begin(
    tokenizer: Tokenizer, own: _TokenizerConfig, config: _Config, names: dict[str, str]
) -> tuple[int | None, bool]:
    """The begin token, and whether raw prompts start with it.

    What the tokenizer itself puts in front of an empty text says both; an explicit
    `add_bos_token` overrules it.
    """
    put = tokenizer.encode("", add_special_tokens=True).ids
    begin: int | None = tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None
    if begin is None:
        begin = next(iter(put or _ids(config.bos_token_id)), None)
    add = bool(put) and put[0] == begin if own.add_bos_token is None else own.add_bos_token
    return begin, add and begin is not None


def _template(folder: Path, own: _TokenizerConfig) -> str | None:
    """A file of its own wins over the config; of several named ones, the default."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    if own.chat_template is None or isinstance(own.chat_template, str):
        return own.chat_template
    named = {entry.name: entry.template for entry in own.chat_template}
    return named.get("default")
