"""The forms in which models write calls. Which one a model uses, its chat template shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `opening`, one JSON object with "name" and the member `arguments`, `closing`. Where
    there is a `named`, the object is of the arguments alone: `opening`, name, `named`, object,
    `closing`.

    Without `opening` a call is known by beginning the answer. `several`: more than one may stand in
    an answer, with `between` between them, and all of them within `around`.
    """

    name: str
    arguments: str
    opening: str = ""
    closing: str = ""
    between: str = ""
    several: bool = True
    named: str = ""
    around: tuple[str, str] = ("", "")


HERMES = ToolFormat(
    "hermes", "arguments", opening="<tool_call>\n", closing="\n</tool_call>", between="\n"
)
"""Qwen 2.5 and 3, Hermes."""
LLAMA3 = ToolFormat("llama3", "parameters", between="; ")
"""Llama 3.1 and later, whose <|python_tag|> prints nothing."""
PLAIN = ToolFormat("plain", "arguments", several=False)
"""What `fallback` asks of models whose template knows no tools, and Mistral's after its marker."""

_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK3 = ToolFormat(
    "deepseek3",
    "arguments",
    opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    named="\n```json\n",
    closing="\n```<｜tool▁call▁end｜>",
    between="\n",
    around=_DEEPSEEK,
)
"""DeepSeek V3 and R1."""
DEEPSEEK31 = ToolFormat(
    "deepseek31",
    "arguments",
    opening="<｜tool▁call▁begin｜>",
    named="<｜tool▁sep｜>",
    closing="<｜tool▁call▁end｜>",
    around=_DEEPSEEK,
)
"""DeepSeek V3.1 and later."""

ARGUMENT_NAMES = ("arguments", "parameters")
"""Models mix them up; both are read in every form."""


def format_of(template: str | None) -> ToolFormat:
    """The form that `template` teaches its model."""
    if template is not None and "<tool_call>" in template:
        return HERMES
    if template is not None and _DEEPSEEK[0] in template:
        return DEEPSEEK3 if "```json" in template else DEEPSEEK31
    if template is not None and '"parameters": ' in template and "ipython" in template:
        return LLAMA3
    return PLAIN
