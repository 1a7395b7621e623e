"""Lines to copy: a running world asked with curl and with Python."""

from __future__ import annotations

QUESTION = "What is the capital of France? Answer in one sentence."


def curl(base: str, model: str) -> str:
    return (
        f"curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d \\\n"
        f'  \'{{"model": "{model}", "stream": true, '
        f'"messages": [{{"role": "user", "content": "{QUESTION}"}}]}}\''
    )


def python(base: str, model: str) -> str:
    return (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{base}/v1", api_key="none")\n'
        f'question = [{{"role": "user", "content": "{QUESTION}"}}]\n'
        f'answer = client.chat.completions.create(model="{model}", messages=question)\n'
        "print(answer.choices[0].message.content)"
    )


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
