"""How each kind of model cuts text before merging."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from core.text.pretokenizers import pre_kind

TEXT = "It's the year 2024!\n \n   x/\n"
CASES = {
    "gpt-2": "It|'s| the| year| 2024|!|\n \n  | x|/|\n",
    "smollm": "It|'s| the| year| |2|0|2|4|!|\n \n  | x|/|\n",
    "llama-bpe": "It|'s| the| year| |202|4|!\n| \n|  | x|/\n",
    "qwen2": "It|'s| the| year| |2|0|2|4|!\n| \n|  | x|/\n",
    "gpt-4o": "It's| the| year| |202|4|!\n| \n|  | x|/\n",
    "tekken": "It|'s| the| year| |2|0|2|4|!\n| \n|  | x|/\n",
    "deepseek-v3": "It|'s| the| year| |202|4|!\n| \n|  | x|/\n",
}
KINDS = (*CASES, "starcoder", "command-r", "llama4", "qwen35", "stablelm2", "falcon3")


def cut(name: str, text: str) -> list[str]:
    pieces = pre_kind(name).pre_tokenizer().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(("name", "pieces"), CASES.items(), ids=CASES)
def test_cuts(name: str, pieces: str) -> None:
    assert cut(name, TEXT) == pieces.split("|")


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_no_character_is_lost(name: str, text: str) -> None:
    assert "".join(cut(name, text)) == text


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'klingon' is not supported; known are .*smollm"):
        pre_kind("klingon")
