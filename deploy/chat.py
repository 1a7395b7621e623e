"""`skerry chat`: one question, or a conversation."""

from __future__ import annotations

import sys

import httpx

from deploy.access import headers_of
from deploy.calling import edge_client
from deploy.client import Answer, AskFailed, Turn, ask
from deploy.screen import Screen


class Chat:
    """Keeps the turns; each question is sent with all that came before it."""

    def __init__(
        self, base: str, model: str, max_tokens: int, temperature: float, key: str | None = None
    ) -> None:
        self._base = base
        self._headers = headers_of(key)
        self._model = model
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._turns: list[Turn] = []
        self._line_open = False
        self._waiting = Screen(sys.stderr)
        self._waited = False

    def run(self, prompt: str | None) -> None:
        """Answer `prompt`, or what stdin holds, or one line after another from a terminal. The
        last line is ended whatever happens. Raises AskFailed."""
        try:
            with edge_client(self._base, headers=self._headers) as client:
                if prompt is not None:
                    self._ask(client, prompt)
                elif not sys.stdin.isatty():
                    self._ask(client, _piped(sys.stdin.buffer.read()))
                else:
                    self._converse(client)
        finally:
            self._end_line()

    def _converse(self, client: httpx.Client) -> None:
        print(f"{self._model} at {self._base}; an empty line or Ctrl-D ends the conversation")
        while True:
            self._line_open = True  # Ctrl-C and Ctrl-D leave the cursor behind the prompt
            try:
                line = input("> ").strip()
            except EOFError:
                return
            self._line_open = False
            if not line:
                return
            try:
                self._ask(client, line)
            except AskFailed as failure:
                self._end_line()
                print(failure)

    def _ask(self, client: httpx.Client, prompt: str) -> None:
        """A question that fails is forgotten."""
        if not prompt.strip():
            raise AskFailed("nothing was asked: the question is empty")
        turns = [*self._turns, Turn("user", prompt)]
        try:
            answer = ask(
                client,
                self._base,
                model=self._model,
                turns=turns,
                show=self._stream,
                wait=self._wait,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
            )
        finally:
            self._wait_is_over()
        self._turns = [*turns, Turn("assistant", answer.text)]
        self._line_open = True  # also after an empty answer
        self._end_line()
        if answer.finish == "length" and sys.stderr.isatty():
            print(
                f"(cut off after {answer.completion_tokens} tokens: --max-tokens)", file=sys.stderr
            )
        if sys.stdout.isatty():
            print(f"\x1b[2m{_footer(answer)}\x1b[0m")

    def _wait(self, why: str) -> None:
        """On a terminal the words stay until the answer begins; elsewhere the first are said."""
        if self._waiting.live:
            self._waiting.draw(why)
        elif not self._waited:
            self._waiting.say(why)
        self._waited = True

    def _wait_is_over(self) -> None:
        if self._waited:
            self._waiting.draw("")
        self._waited = False

    def _stream(self, piece: str) -> None:
        self._wait_is_over()
        self._line_open = True  # first: Ctrl-C may come right after the piece
        print(piece, end="", flush=True)

    def _end_line(self) -> None:
        if self._line_open:
            print(flush=True)
        self._line_open = False


def _piped(given: bytes) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise AskFailed(f"standard input is not UTF-8 text: byte {error.start}") from error


def _footer(answer: Answer) -> str:
    trace = answer.trace
    places = f"{trace.edge} → {trace.region} ({trace.reason}), " if trace.region else ""
    return (
        f"{places}{answer.prompt_tokens} prompt tokens, {answer.cached_tokens} cached, "
        f"{answer.completion_tokens} made, {answer.first_s * 1000:.0f} ms to the first, "
        f"{answer.tokens_per_s:.0f} tokens/s"
    )
