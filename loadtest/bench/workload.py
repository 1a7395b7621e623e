"""What the contestants are asked: pure, and the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

PROMPT = 128
"""Tokens of a prompt before decode is measured."""
DECODED = 64
PREFILL = 1024
REPEATED = 160
"""Tokens of an answer that repeats its prompt."""
_FIRST_ID, _LAST_ID = 100, 40_000
"""Ordinary tokens; those below are control tokens in many vocabularies."""


@dataclass(frozen=True, slots=True)
class Request:
    """`at`: seconds after the start. `tokens`: length of the answer."""

    at: float
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that arrive by Poisson, faster than they can be served, so that a queue forms."""

    count: int = 64
    per_second: float = 8.0
    prompts: tuple[int, int] = (64, 1024)
    answers: tuple[int, int] = (16, 128)


def prompt(random: Random, length: int, vocabulary: int) -> tuple[int, ...]:
    """Random ids: nothing that a prefix cache could know from an earlier request."""
    last = min(_LAST_ID, vocabulary - 1)
    return tuple(random.choices(range(min(_FIRST_ID, last), last + 1), k=length))


def batch(random: Random, size: int, vocabulary: int) -> list[Request]:
    """`size` requests at once. They start to decode at different times, so each has some tokens
    more than are wanted: the measured span is the one in which all of them decode."""
    spare = 1 + size
    return [Request(0.0, prompt(random, PROMPT, vocabulary), DECODED + spare) for _ in range(size)]


def prefill(random: Random, vocabulary: int) -> list[Request]:
    return [Request(0.0, prompt(random, PREFILL, vocabulary), 1)]


def mixed(random: Random, mix: Mix, vocabulary: int) -> list[Request]:
    at = 0.0
    requests = []
    for _ in range(mix.count):
        length, tokens = random.randint(*mix.prompts), random.randint(*mix.answers)
        requests.append(Request(at, prompt(random, length, vocabulary), tokens))
        at += random.expovariate(mix.per_second)
    return requests


def agent_text(random: Random) -> str:
    """An agent's transcript in which a file is read, and written again with nothing changed: most
    of the answer stands in the prompt. Numbers differ from call to call."""
    names = ["retries", "timeout_s", "batch", "workers", "queue", "backoff_s", "limit", "depth"]
    random.shuffle(names)
    lines = [f"{name} = {random.randint(2, 900)}" for name in names]
    body = "\n".join(["[service]", *lines, "", "[limits]", *reversed(lines), ""])
    block = f"```toml\n{body}```\n"
    steps = "\n".join(
        f"Step {n}: the agent reads config.toml.\n{block}Step {n} done: the file was not changed.\n"
        for n in (1, 2)
    )
    return f"{steps}\nStep 3: the agent reads config.toml.\n```toml\n[service]\n"
