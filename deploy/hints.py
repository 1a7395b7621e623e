"""Lines to copy: a running world asked with curl and with Python."""

from __future__ import annotations

QUESTION = "What is the capital of France? Answer in one sentence."


def curl(base: str, model: str, *, key: bool = False) -> str:
    """`key`: the world wants one, from the variable SKERRY_KEY."""
    said = ' -H "authorization: Bearer $SKERRY_KEY"' if key else ""
    return (
        f"curl -N {base}/v1/chat/completions{said} -H 'content-type: application/json' -d \\\n"
        f'  \'{{"model": "{model}", "stream": true, "temperature": 0, '
        f'"messages": [{{"role": "user", "content": "{QUESTION}"}}]}}\''
    )


def python(base: str, model: str, *, key: bool = False) -> str:
    imports, given = ("import os\n", 'os.environ["SKERRY_KEY"]') if key else ("", '"none"')
    return (
        f"{imports}from openai import OpenAI  # pip install openai\n"
        f'client = OpenAI(base_url="{base}/v1", api_key={given})\n'
        f'question = [{{"role": "user", "content": "{QUESTION}"}}]\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{model}", messages=question, temperature=0\n'
        ")\n"
        "print(answer.choices[0].message.content)"
    )


def indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
