"""vLLM as a worker of the benchmark; runs in the peers' own venv: `vllm_worker.py FOLDER …`.

Its engine is stepped in this very process, without a server, a front or detokenising: the shortest
way that vLLM has from token ids to token ids.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine


def play(engine: LLMEngine, requests: list[dict[str, Any]], number: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in requests]
    coming = sorted(range(len(requests)), key=lambda n: requests[n]["at"], reverse=True)
    began = time.perf_counter()
    while coming or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while coming and requests[coming[-1]]["at"] <= now:
            index = coming.pop()
            request = requests[index]
            engine.add_request(
                f"{number}.{index}",
                {"prompt_token_ids": request["prompt"]},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request["tokens"],
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                ),
            )
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, requests[coming[-1]]["at"] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            index = int(output.request_id.partition(".")[2])
            times[index] += [now] * len(output.outputs[0].token_ids)
    return times


def main() -> None:
    folder, step_tokens, kv_gib = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = kv_gib
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print
    began = time.perf_counter()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=64,
            max_num_batched_tokens=step_tokens,
            disable_log_stats=True,
        )
    )
    ready = {
        "ready_s": time.perf_counter() - began,
        "pid": os.getpid(),
        "vocab_size": engine.model_config.get_vocab_size(),
    }
    answers.write(json.dumps(ready) + "\n")
    for number, line in enumerate(sys.stdin):
        times = play(engine, json.loads(line)["requests"], number)
        answers.write(json.dumps({"times": times}) + "\n")


if __name__ == "__main__":
    main()
