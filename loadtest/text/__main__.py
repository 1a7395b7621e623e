"""`make bench-text`: time per token with a JSON Schema against without, sixteen answers at once.

One rank process answers both kinds by turns, so what slows the machine down slows both. Every row
has a schema of its own. Exit status: 0, 1 when a figure is below its floor, 2 when nothing could be
measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import Random

from loadtest.bench import cast, probe, report
from loadtest.bench.__main__ import bundled_model
from loadtest.bench.cast import Setting
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median, steady
from loadtest.bench.workers import ContestantFailed, Worker
from loadtest.bench.workload import Request, prompt

PROJECT = Path(__file__).parents[2]
BATCH = 16
FREE, HELD = "free", "with a schema"
_PLAY_S = 300.0
_DECODE, _FIRST = "decode 16", "first token"


PROMPT, TOKENS = 32, 128
"""Short prompts, so that all are read long before the first answer is complete."""


@dataclass(frozen=True, slots=True)
class Held(Request):
    schema: str = ""


def schema(row: int) -> str:
    """Rows of a table, too many for any answer here to end by itself."""
    line = {
        "type": "object",
        "properties": {
            f"name_{row}": {"type": "string", "maxLength": 40},
            "amount": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kinds": {"type": "array", "items": {"enum": ["red", "blue", "green"]}, "maxItems": 3},
            "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 60}]},
        },
        "required": [f"name_{row}", "amount", "kinds", "note"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": line, "minItems": 500})


def batch(random: Random, size: int, vocabulary: int) -> list[Request]:
    return [Request(0.0, prompt(random, PROMPT, vocabulary), TOKENS) for _ in range(size)]


def held(requests: Sequence[Request]) -> list[Held]:
    return [Held(one.at, one.prompt, one.tokens, schema(row)) for row, one in enumerate(requests)]


def measure(worker: Worker, *, rounds: int, seed: int) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of both kinds, one each a round, and milliseconds to the first token of a
    lone request before and after the rank had met a schema. Raises ContestantFailed."""
    random = Random(seed)
    vocabulary = worker.started.vocab_size

    def play(requests: Sequence[Request]) -> list[list[float]]:
        times = worker.play(requests, _PLAY_S)
        wanted = [one.tokens for one in requests]
        if [len(one) for one in times] != wanted:
            raise ContestantFailed(f"answers have {[len(one) for one in times]} tokens")
        return times

    def first_ms(requests: Sequence[Request]) -> float:
        return play(requests)[0][0] * 1000

    def lone() -> list[Request]:
        return batch(random, 1, vocabulary)

    samples: dict[str, dict[str, list[float]]] = {
        _DECODE: {FREE: [], HELD: []},
        _FIRST: {FREE: [], "the first schema": [], HELD: []},
    }
    play(batch(random, BATCH, vocabulary))
    samples[_FIRST][FREE].append(first_ms(lone()))
    samples[_FIRST]["the first schema"].append(first_ms(held(lone())))
    play(held(batch(random, BATCH, vocabulary)))
    for number in range(rounds):
        kinds = (FREE, HELD) if number % 2 else (HELD, FREE)
        for kind in kinds:
            requests = batch(random, BATCH, vocabulary)
            times = play(held(requests) if kind == HELD else requests)
            samples[_DECODE][kind].append(steady(times))
            one = lone()
            samples[_FIRST][kind].append(first_ms(held(one) if kind == HELD else one))
    return samples


def figures(samples: dict[str, dict[str, list[float]]]) -> list[Figure]:
    """A ratio is the median of the rounds' own."""
    free, bound = samples[_DECODE][FREE], samples[_DECODE][HELD]
    pairs = [one / other for one, other in zip(free, bound, strict=True)]
    waits = samples[_FIRST]
    usual = median(waits[FREE])
    return [
        Figure(
            "time per token with a schema / without, batch 16", median(pairs), "×", 1.05, 1.1,
            f"{median(bound):.4g} against {median(free):.4g} tok/s",
        ),
        Figure("first token later for a schema", median(waits[HELD]) - usual, "ms", 5.0, 50.0),
        Figure(
            "first token later for the first schema of a rank",
            waits["the first schema"][0] - usual, "ms", 600.0, 2000.0,
        ),
    ]  # fmt: skip


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-text", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--native", choices=("on", "off"), default="on")
    parser.add_argument("--model", type=Path, help="a GGUF file; the bundled one by default")
    options = parser.parse_args(arguments)
    setting = Setting(
        project=PROJECT,
        model=options.model or bundled_model(),
        build=PROJECT / "build" / "bench",
        threads=options.threads,
        native=options.native == "on",
        step_tokens=512,
        say=say,
    )
    try:
        worker = cast.ours(setting, speculation=False, log="text.log")
        try:
            samples = measure(worker, rounds=options.rounds, seed=options.seed)
        finally:
            worker.close()
    except (ContestantFailed, ValueError) as error:
        sys.stderr.write(f"bench-text: {error}\n")
        return 2
    measured = figures(samples)
    command = "make bench-text" + (
        f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
    )
    versions = {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "llguidance": metadata.version("llguidance"),
    }
    machine = probe.describe()
    table = report.markdown(command, machine, versions, measured, samples)
    setting.build.mkdir(parents=True, exist_ok=True)
    (setting.build / "text.json").write_bytes(report.as_json(command, machine, versions, measured))
    (setting.build / "text.md").write_text(table, encoding="utf-8")
    say("\n" + table)
    return 1 if any(figure.fails for figure in measured) else 0


if __name__ == "__main__":
    raise SystemExit(main())
