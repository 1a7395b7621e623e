"""Transformers as a worker of the benchmark; runs in the peers' own venv.

One static batch at a time, as the library is used without a server: all requests at once, prompts
of one length, the cache it makes by default, the most likely token each time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def play(model: Any, requests: list[dict[str, Any]]) -> list[list[float]]:
    began = time.perf_counter()
    ids = torch.tensor([request["prompt"] for request in requests])
    times: list[float] = []
    cache = None
    for _ in range(requests[0]["tokens"]):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        times.append(time.perf_counter() - began)
    return [times] * len(requests)


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print
    torch.set_num_threads(threads)
    began = time.perf_counter()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.eval()
    ready = {
        "ready_s": time.perf_counter() - began,
        "pid": os.getpid(),
        "vocab_size": model.config.vocab_size,
    }
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        times = play(model, json.loads(line)["requests"])
        answers.write(json.dumps({"times": times}) + "\n")


if __name__ == "__main__":
    main()
