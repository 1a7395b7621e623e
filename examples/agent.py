"""An agent's loop against a running world (`make up`): the model must ask for a tool, is given what
the tool says, and answers. With the official OpenAI client (`pip install openai`).

    python examples/agent.py Paris

EDGE, MODEL and SKERRY_KEY as for chat.py.
"""

import json
import os
import sys

from openai import OpenAI

EDGE = os.environ.get("EDGE", "http://127.0.0.1:8787")
MODEL = os.environ.get("MODEL", "smollm2")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(city: str) -> None:
    client = OpenAI(base_url=f"{EDGE}/v1", api_key=os.environ.get("SKERRY_KEY", "none"))
    talk = [{"role": "user", "content": f"What is the weather in {city}?"}]
    asked = client.chat.completions.create(
        model=MODEL, messages=talk, tools=[WEATHER], tool_choice="required", temperature=0
    )
    call = asked.choices[0].message.tool_calls[0]
    print(f"it calls {call.function.name}({json.loads(call.function.arguments)})")
    talk += [
        asked.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 18 degrees"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=talk, tools=[WEATHER], tool_choice="none", temperature=0
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Paris")
