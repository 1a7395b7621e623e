"""Maker of tiny tokenizer folders: real tokenizer.json files that load in a millisecond.

The vocabulary is the 256 bytes (ids 0 to 255, in byte order), a few merges, then the specials.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES: Final = (
    "t h", "th e", "Ġ the", "i n", "a n", "e r", "l l", "Ġ a", "o u", "q u", "Ġ w", "Ġw o",
)  # fmt: skip
_FIRST_SPECIAL: Final = 256 + len(MERGES)
ENDOFTEXT_ID: Final = _FIRST_SPECIAL
IM_START_ID: Final = _FIRST_SPECIAL + 1
IM_END_ID: Final = _FIRST_SPECIAL + 2
VOCAB_SIZE: Final = _FIRST_SPECIAL + len(SPECIALS)


def byte_letters() -> list[str]:
    """The letter that stands for each byte, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    others = 0
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(0x100 + others))
        others += byte not in printable
    return letters


def tiny_tokenizer(
    *,
    specials: Sequence[str | AddedToken] = SPECIALS,
    merges: Sequence[str] = MERGES,
) -> Tokenizer:
    """A byte-level tokenizer whose specials follow bytes and merges in the order given."""
    pairs = [(merge.split()[0], merge.split()[1]) for merge in merges]
    tokens = byte_letters() + [first + second for first, second in pairs]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(special, special=True, normalized=False)
            if isinstance(special, str)
            else special
            for special in specials
        ]
    )
    return tokenizer


def write_tiny_folder(
    folder: Path,
    *,
    template: str | None = CHATML,
    tokenizer: Tokenizer | None = None,
    context: int = 4096,
    vocab_size: int | None = None,
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
    add_bos_token: bool | None = None,
    config_ends: int | list[int] | None = IM_END_ID,
    generation_ends: int | list[int] | None = None,
) -> Path:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

    By default `<|im_end|>` and `<|endoftext|>` end a turn. Gives `folder` back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
    if generation_ends is None:
        generation_ends = [IM_END_ID, ENDOFTEXT_ID]
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": eos_token,
        "bos_token": bos_token,
        "add_bos_token": add_bos_token,
    }
    files = {
        "tokenizer_config.json": {key: value for key, value in own.items() if value is not None},
        "config.json": {
            "model_type": "llama",
            "vocab_size": size,
            "max_position_embeddings": context,
            "eos_token_id": config_ends,
        },
        "generation_config.json": {"eos_token_id": generation_ends},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
