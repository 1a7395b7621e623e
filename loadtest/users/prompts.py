"""Prompts out of numbers: the same number gives the same words, so that runs can be repeated and
what is to be found in a cache can be."""

from __future__ import annotations

import random
from collections.abc import Sequence

WORDS = (
    "harbour", "tide", "lamp", "rope", "gull", "island", "chart", "buoy", "storm", "calm", "deck",
    "sail", "anchor", "reef", "current", "wind", "shore", "light", "fog", "signal", "crew",
    "engine", "cargo", "pilot", "bridge", "hull", "keel", "mast", "north", "south", "east",
    "west", "morning", "evening", "rain", "cloud", "stone", "sand", "water", "salt", "fish",
    "net", "boat", "ferry", "quay", "crane", "crate", "barrel", "letter", "number", "report",
    "list", "answer", "question", "reason", "result", "small", "large", "early", "late", "near",
    "far",
)  # fmt: skip
SYSTEM_WORDS = 220
SYSTEMS = 8
"""System prompts that conversations share."""
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "tide",
            "description": "When the tide is high at a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 20}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    },
)


def tool_round(turn: int) -> list[dict[str, object]]:
    """What an agent adds to its conversation: the call that a model makes, and its result."""
    call = {
        "id": f"call_{turn}",
        "type": "function",
        "function": {"name": "tide", "arguments": '{"place": "harbour"}'},
    }
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{turn}",
         "content": f"high tide at {words(('tide', turn), 12)}"},
    ]  # fmt: skip


def words(seed: object, count: int) -> str:
    """`count` words, a sentence now and then."""
    source = random.Random(str(seed))
    found = source.choices(WORDS, k=count)
    for place in range(0, count, 12):
        found[place] = found[place].capitalize()
        if place:
            found[place - 1] += "."
    return " ".join(found)


def system(number: int) -> str:
    """One of the few that many conversations begin with."""
    return f"You keep the log of harbour {number % SYSTEMS}. " + words(
        ("system", number % SYSTEMS), SYSTEM_WORDS
    )


def document(number: int, count: int) -> str:
    return words(("document", number), count)


def from_blocks(blocks: Sequence[int], words_each: int) -> str:
    """A trace's request: equal blocks at the beginning are equal text there."""
    return "\n".join(words(("block", block), words_each) for block in blocks)
