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
    """Shows calls and their results."""
    shows_tools: bool = False
    """Shows what tools there are."""

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
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n' }}
    {{- 'Respond in the form {"name": function, "parameters": its arguments}.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
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
    shows_tools=True,
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

# Tools in the system turn within marks, calls and results between marks, a system turn of its own.
QWEN = Family(
    "qwen",
    """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are an assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nSignatures stand within <tools></tools>:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nA call is written within <tool_call></tool_call>.<|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are an assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}
            {{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        AddedToken("<tool_call>", special=False, normalized=False),
        AddedToken("</tool_call>", special=False, normalized=False),
    ),
    end="<|im_end|>",
    takes_tools=True,
    shows_tools=True,
)

# No system role, the assistant is called model, contents are trimmed.
GEMMA = Family(
    "gemma",
    """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    end="<end_of_turn>",
    begin="<bos>",
    takes_system=False,
)

# System texts are gathered first; turns are marked by bars that are not ASCII.
DEEPSEEK = Family(
    "deepseek",
    """{% set ns = namespace(system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{- ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}""",
    (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        AddedToken("<think>", special=False, normalized=False),
        AddedToken("</think>", special=False, normalized=False),
    ),
    end="<｜end▁of▁sentence｜>",
    begin="<｜begin▁of▁sentence｜>",
)

# Tools stand in the system turn between marks of their own.
PHI = Family(
    "phi",
    """{% for message in messages %}
{% if message['role'] == 'system' and tools %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + (tools | tojson)
   + '<|/tool|>' + '<|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>",
     "<|end|>"),
    end="<|end|>",
    shows_tools=True,
)  # fmt: skip

ALL = (CHAT_ML, LLAMA3, MISTRAL, THINKING, ROLES, QWEN, GEMMA, DEEPSEEK, PHI)
