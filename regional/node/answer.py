"""What one decoding sequence has written so far: token ids in, event frames out. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.engine.messages import SequenceSpec, TokenOutput
from core.errors import RequestError, to_fault
from core.events import Delta, Done, Finish, encode_frame
from core.types import FinishReason, GenerateRequest, Timings, Usage


class Written(Protocol):
    """What a writer gives out for a push: see core.text."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def finish(self) -> FinishReason | None: ...
    @property
    def tokens(self) -> int: ...


class Writer(Protocol):
    """Detokeniser and stop strings of one choice."""

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> Written: ...


class Text(Protocol):
    """The part of a text model that a front needs."""

    @property
    def end_ids(self) -> frozenset[int]: ...

    def writer(self, stops: tuple[str, ...], end_ids: frozenset[int]) -> Writer: ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the hand-off brought: prompt tokens that the prefill node computed, time, bytes."""

    computed_tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Frames of one step. `cut`: a stop string ended the choice while the rank goes on."""

    frames: bytes
    delta: bool
    last: bool
    cut: bool


class Answer:
    """One choice of one request. `placed_at` is when this node heard of the request."""

    def __init__(
        self, request: GenerateRequest, spec: SequenceSpec, text: Text, *, placed_at: float
    ) -> None:
        self.transfer = Transfer()
        self.queued_s = 0.0
        self.delta_sent = False
        self._spec = spec
        self._writer = text.writer(request.sampling.stop, spec.stop_ids)
        self._placed_at = placed_at
        self._first_at: float | None = None
        self._computed_here = 0
        self._carry = ""
        self._skip = 0
        if spec.output_ids:  # a continued answer: its text up to here is known to the client
            self._skip = sum(p.chars_sent for p in request.resume if p.choice == spec.choice)
            self._carry = self._unsent(self._writer.push(spec.output_ids, None).text)

    def absorb(self, output: TokenOutput, *, now: float) -> Chunk:
        """The frames that `output` makes."""
        if output.computed_tokens is not None:
            self._computed_here = output.computed_tokens
        if self._first_at is None:
            self._first_at = now
        written = self._writer.push(output.token_ids, output.finish)
        text = self._carry + self._unsent(written.text)
        self._carry = ""
        frames = b""
        delta = bool(text or written.token_ids)
        if delta:
            self.delta_sent = True
            choice = self._spec.choice
            frames = encode_frame(Delta(choice=choice, token_ids=written.token_ids, text=text))
        if written.finish is not None:
            frames += encode_frame(Finish(choice=self._spec.choice, reason=written.finish))
            frames += encode_frame(self._done(written.tokens, self._first_at, now))
        return Chunk(
            frames=frames,
            delta=delta,
            last=written.finish is not None,
            cut=written.finish is not None and output.finish is None,
        )

    def fault(self, error: RequestError) -> bytes:
        """The frame that ends the stream irregularly."""
        return encode_frame(to_fault(error))

    def _done(self, tokens: int, first_at: float, now: float) -> Done:
        prompt = len(self._spec.token_ids)
        computed = self.transfer.computed_tokens + self._computed_here
        return Done(
            usage=Usage(
                prompt_tokens=prompt,
                completion_tokens=tokens,
                cached_tokens=max(0, prompt - computed),
            ),
            timings=Timings(
                queue_s=self.queued_s,
                prefill_s=first_at - self._placed_at,
                decode_s=now - first_at,
                transfer_s=self.transfer.seconds,
                kv_bytes=self.transfer.bytes,
            ),
        )

    def _unsent(self, text: str) -> str:
        rest = text[self._skip :]
        self._skip = max(0, self._skip - len(text))
        return rest
