"""Ask a running world (`make up`) with the official OpenAI client (`pip install openai`).

    python examples/chat.py 'What is the capital of France? Answer in one sentence.'

EDGE and MODEL in the environment name another edge or model, SKERRY_KEY the key of a world that
wants one.
"""

import os
import sys

from openai import OpenAI

EDGE = os.environ.get("EDGE", "http://127.0.0.1:8787")
MODEL = os.environ.get("MODEL", "smollm2")


def main(question: str) -> None:
    client = OpenAI(base_url=f"{EDGE}/v1", api_key=os.environ.get("SKERRY_KEY", "none"))
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(
                f"\n({chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} made)"
            )


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "What is the capital of France? Answer in one sentence.")
