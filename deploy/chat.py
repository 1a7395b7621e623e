"""`skerry chat`: one question, or a conversation."""

from __future__ import annotations

import sys

import httpx

from deploy.client import Answer, AskFailed, Turn, ask


class Chat:
    """Keeps the turns; each question is sent with all that came before it."""

    def __init__(
        self, base: str, model: str, max_tokens: int | None, temperature: float | None
    ) -> None:
        self._base = base
        self._model = model
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._turns: list[Turn] = []

    def run(self, prompt: str | None) -> None:
        """Answer `prompt`, or what stdin holds, or one line after another from a terminal.
        Raises AskFailed."""
        with httpx.Client(trust_env=False) as client:
            if prompt is not None:
                self._ask(client, prompt)
            elif not sys.stdin.isatty():
                self._ask(client, sys.stdin.read())
            else:
                self._converse(client)

    def _converse(self, client: httpx.Client) -> None:
        print(f"{self._model} at {self._base}; an empty line or Ctrl-D ends the conversation")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            if not line:
                return
            try:
                self._ask(client, line)
            except AskFailed as failure:
                print(f"\n{failure}")
                self._turns.pop()

    def _ask(self, client: httpx.Client, prompt: str) -> None:
        self._turns.append(Turn("user", prompt))
        answer = ask(
            client,
            self._base,
            model=self._model,
            turns=self._turns,
            show=_stream,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
        )
        self._turns.append(Turn("assistant", answer.text))
        print()
        if sys.stdout.isatty():
            print(f"\x1b[2m{_footer(answer)}\x1b[0m")


def _stream(piece: str) -> None:
    print(piece, end="", flush=True)


def _footer(answer: Answer) -> str:
    trace = answer.trace
    places = f"{trace.edge} → {trace.region} ({trace.reason}), " if trace.region else ""
    return (
        f"{places}{answer.prompt_tokens} prompt tokens, {answer.cached_tokens} cached, "
        f"{answer.completion_tokens} made, {answer.first_s * 1000:.0f} ms to the first, "
        f"{answer.tokens_per_s:.0f} tokens/s"
    )
