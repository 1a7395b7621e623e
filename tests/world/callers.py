"""Callers of a world in which something is changed: nobody's request may fail for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import httpx

from tests.world.scripted import PLAIN, Answer, ask, completion

WORDS = "".join(f"{number} keepers of lights write a log. " for number in range(6))


class HasEdges(Protocol):
    """A running world: URLs of its edges by name."""

    @property
    def edges(self) -> Mapping[str, str]: ...


class Callers:
    """So many who ask one question after the other until the block ends. One in two keeps its
    connection, as a client library does; the others come anew each time."""

    def __init__(self, world: HasEdges, count: int = 20, tokens: int = 60) -> None:
        self._tokens = tokens
        self.answers: list[tuple[str, Answer]] = []
        self.failures: list[BaseException] = []
        self._bases = list(world.edges.values())
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(count)
        ]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        base, turn = self._bases[number % len(self._bases)], 0
        with httpx.Client(base_url=base, timeout=60, trust_env=False, verify=PLAIN) as kept:
            while not self._over.is_set():
                turn += 1
                prompt = f"{number}, {turn}: {WORDS}"
                body = completion(prompt, max_tokens=self._tokens)
                try:
                    answer = ask(base, body, client=kept if number % 2 else None)
                except httpx.HTTPError as error:
                    self.failures.append(error)
                    return
                self.answers.append((prompt, answer))

    def check(self) -> None:
        assert self.failures == []
        bad = [one for _, one in self.answers if one.error is not None or not one.done]
        assert bad == []
        assert all(prompt.startswith(answer.text) for prompt, answer in self.answers)
        assert {answer.finish for _, answer in self.answers} <= {"length", "stop"}
