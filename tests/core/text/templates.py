"""Chat templates in the manner of well-known families, each with its control tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken

from tests.tiny_text import CHATML


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    specials: tuple[str | AddedToken, ...]
    end: str
    begin: str | None = None
    takes_system: bool = True
    takes_tools: bool = False

    @property
    def writes_begin(self) -> bool:
        return "bos_token" in self.template

    def __str__(self) -> str:
        return self.name


CHAT_ML = Family(
    "chatml", CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), end="<|im_end|>"
)

# Headers, trimmed contents, tool calls as JSON, begin token written by the template.
LLAMA3 = Family(
    "llama3",
    """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", ' }}
            {{- '"parameters": ' }}{{- call.function.arguments | tojson }}{{- "}" }}
        {%- endfor %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    end="<|eot_id|>",
    begin="<|begin_of_text|>",
    takes_tools=True,
)

# Strict turns, no system role, tool calls walked as a mapping.
MISTRAL = Family(
    "mistral",
    """{{ bos_token }}{% set ns = namespace(turn=0) %}{% for message in messages %}
{% if message['role'] == 'tool' %}
{{ '[TOOL_RESULTS]' + message['content'] + '[/TOOL_RESULTS]' }}
{% elif message.tool_calls %}
{{ '[TOOL_CALLS]' }}{% for call in message.tool_calls %}{{ call.function.name }}(
{%- for key, item in call.function.arguments.items() %}{{ key }}={{ item }};{% endfor %})
{% endfor %}{{ eos_token }}
{% elif (message['role'] == 'user') != (ns.turn % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% else %}
{% set ns.turn = ns.turn + 1 %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{% endif %}
{% endfor %}""",
    ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    end="</s>",
    begin="<s>",
    takes_system=False,
    takes_tools=True,
)

# Looks into contents: thoughts are cut out of earlier answers, tool results share a user turn.
THINKING = Family(
    "thinking",
    """{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' }}{{ call.function.name }}
            {{- '", "arguments": ' }}{{ call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
        {{- '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *(
            AddedToken(text, special=False, normalized=False)
            for text in (
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "<tool_response>",
                "</tool_response>",
                "    ",
            )
        ),
    ),
    end="<|im_end|>",
    takes_tools=True,
)

# Builds its markers around the role.
ROLES = Family(
    "roles",
    "{% for message in messages %}{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    end="<|end|>",
)

ALL = (CHAT_ML, LLAMA3, MISTRAL, THINKING, ROLES)
